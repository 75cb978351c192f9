"""The exceptions of the gateway.

HeadraceGatewayError
├── GatewaySettingsError     a setting, the key file or an environment variable has a value that cannot be used
├── ApiError                 the client receives it as an HTTP response, in OpenAI's error body
│   └── ModelLoadingError    no worker serves the model yet, and one is loading it
├── UnknownParserError       no parser has this name, or the two parsers cannot be combined
├── ForcedChoiceError        the tools cannot be written as a grammar
└── BatchError               a batch cannot continue
    └── InputRefusedError    lines of a batch's input are invalid, and nothing was sent
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace_wire.codes import ErrorCode
from headrace_wire.errors import CopyableError


class HeadraceGatewayError(CopyableError):
    """Root of the tree."""


class GatewaySettingsError(HeadraceGatewayError, ValueError):
    """A setting, the key file or an environment variable has a value that cannot be used."""


class ApiError(HeadraceGatewayError):
    """An error that the client receives in OpenAI's error body.

    Args:
        status: HTTP status.
        kind: OpenAI's `type`, such as `invalid_request_error`.
        code: a fixed word for programs, such as `model_not_found`.
        message: the sentence for people.
        param: path of the invalid field, such as `messages[2].content`.
        headers: further response headers, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        code: str | None,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status: Final = status
        self.kind: Final = kind
        self.code: Final = code
        self.message: Final = message
        self.param: Final = param
        self.headers: Final = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format. All four keys are always present."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class ModelLoadingError(ApiError):
    """No worker serves the model yet, and one is loading it.

    A batch that is being created is refused with it; the lines of a running one wait, as for any missing model.
    """

    def __init__(self, name: str, progress: float) -> None:
        message = f"the model {name[:64]!r} is loading ({progress:.0%}), and no worker has served it yet; try again"
        retry = {"x-should-retry": "true", "retry-after": "5"}  # OpenAI's SDKs retry any status with the first of these
        super().__init__(404, "invalid_request_error", ErrorCode.MODEL_NOT_FOUND, message, param="model", headers=retry)


def invalid(message: str, *, code: str = ErrorCode.INVALID_REQUEST, param: str | None = None) -> ApiError:
    """Return an error of the client: status 400."""
    return ApiError(400, "invalid_request_error", code, message, param=param)


class UnknownParserError(HeadraceGatewayError, ValueError):
    """No parser has this name, or the two parsers cannot be combined."""


class ForcedChoiceError(HeadraceGatewayError, ValueError):
    """The tools cannot be written as a grammar: it would be too large, or no tool may be called."""


class BatchError(HeadraceGatewayError):
    """A batch cannot continue. The answers written so far stay, and the same command resumes after them."""


class InputRefusedError(BatchError):
    """Lines of a batch's input are invalid, and nothing was sent. `problems` are the first of `num_problems`."""

    def __init__(self, name: str, problems: Sequence["LineProblem"], num_problems: int) -> None:
        more = f"\nand {num_problems - len(problems)} more" if num_problems > len(problems) else ""
        told = "\n".join(map(str, problems))
        super().__init__(f"{name} was refused, and nothing was sent:\n{told}{more}")
        self.problems: Final = tuple(problems)
        self.num_problems: Final = num_problems


@dataclass(frozen=True, slots=True)
class LineProblem:
    """Why a line of a batch's input is refused. The fields are those of OpenAI's batch `errors`."""

    line: int | None
    code: str | None
    message: str
    param: str | None = None

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"
