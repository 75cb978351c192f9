"""The exceptions of the worker side.

HeadraceWorkerError
├── WorkerSettingsError   an environment variable or flag is wrong
└── BatchError            a batch cannot be begun or cannot go on
    └── InputRefusedError   its input has lines that cannot be sent; nothing was
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


class HeadraceWorkerError(Exception):
    """Base of all errors that the worker package raises on purpose."""


class WorkerSettingsError(HeadraceWorkerError, ValueError):
    """A setting cannot be used; the message names it, its value and what is allowed."""


class BatchError(HeadraceWorkerError):
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
