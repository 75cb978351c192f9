"""The exceptions that packages share. Each other package has its own tree in its `errors.py`.

HeadraceError
├── HeadraceBrokerError      the root of headrace_broker
│   └── InvalidRequestError
└── HeadraceEngineError      the root of headrace_engine
    └── InvalidRequestError  the request is invalid; has a list of all problems
"""

from collections.abc import Sequence

from headrace_wire.codes import ErrorCode


class HeadraceError(Exception):
    """Base class of the errors of the client and of the engine."""


class HeadraceBrokerError(HeadraceError):
    """Base class of all errors of headrace_broker."""


class HeadraceEngineError(HeadraceError):
    """Base class of all errors that the engine raises deliberately."""


class InvalidRequestError(HeadraceBrokerError, HeadraceEngineError, ValueError):
    """The request is invalid, and nothing was sent or queued. `problems` has one message for each problem.

    `code` is the error code of the wire. The client and the engine check requests by the same rules.
    """

    code: str = ErrorCode.INVALID_REQUEST

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("; ".join(self.problems))
