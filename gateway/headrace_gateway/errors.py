"""Every error that this package raises, in one tree. ApiError is the one that becomes an HTTP answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


class HeadraceGatewayError(Exception):
    """Root of the tree."""


class GatewaySettingsError(HeadraceGatewayError, ValueError):
    """A setting, the key file or an environment variable has a value that cannot be used."""


class ApiError(HeadraceGatewayError):
    """What a client is told in OpenAI's error body.

    Args:
        status: HTTP status.
        kind: OpenAI's `type`, such as `invalid_request_error`.
        code: a fixed word for programs, such as `model_not_found`.
        message: the sentence for people.
        param: path of the field that is wrong, such as `messages[2].content`.
        headers: further headers of the answer, such as Retry-After.
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
        """The error in OpenAI's shape: all four keys are always there."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, *, code: str = "invalid_request", param: str | None = None) -> ApiError:
    """A fault of the request: status 400."""
    return ApiError(400, "invalid_request_error", code, message, param=param)


class UnknownParserError(HeadraceGatewayError, ValueError):
    """No parser has this name, or two names do not go together."""


class ForcedChoiceError(HeadraceGatewayError, ValueError):
    """The tools cannot be written as a grammar: they are too large, or none may be called."""


class BatchError(HeadraceGatewayError):
    """A batch cannot go on. What has been written stays, and the same command goes on from there."""


class InputRefusedError(BatchError):
    """Lines of a batch's input are wrong, and nothing was sent. `problems` are the first of `num_problems`."""

    def __init__(self, name: str, problems: Sequence["LineProblem"], num_problems: int) -> None:
        more = f"\nand {num_problems - len(problems)} more" if num_problems > len(problems) else ""
        told = "\n".join(map(str, problems))
        super().__init__(f"{name} was refused, and nothing was sent:\n{told}{more}")
        self.problems: Final = tuple(problems)
        self.num_problems: Final = num_problems


@dataclass(frozen=True, slots=True)
class LineProblem:
    """Why a line of a batch's input is refused; the fields are those of a batch's `errors` at OpenAI."""

    line: int | None
    code: str | None
    message: str
    param: str | None = None

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"
