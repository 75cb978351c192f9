"""The exceptions that packages share. Each other package has its own tree in its `errors.py`.

CopyableError                    the root of all trees
└── HeadraceError
    ├── HeadraceBrokerError      the root of headrace_broker
    │   └── InvalidRequestError
    └── HeadraceEngineError      the root of headrace_engine
        └── InvalidRequestError  the request is invalid; has a list of all problems
"""

from collections.abc import Sequence
from typing import Any

from headrace_wire.codes import ErrorCode


class CopyableError(Exception):
    """An exception that can be copied, and pickled by Celery and process pools, whatever its constructor takes.

    Python makes the copy of an exception by a call of its class with `args`, which are only the message.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy_of, (type(self), self.args), self.__dict__


def _copy_of(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    error = kind.__new__(kind, *args)
    error.args = args  # OSError leaves this to the constructor
    return error


class HeadraceError(CopyableError):
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
