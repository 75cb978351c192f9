"""The exceptions of the engine.

HeadraceEngineError
├── ConfigError              an engine option is wrong or does not fit the machine
├── ModelLoadError           the model folder or name cannot be served
│   └── ModelFetchError      the default model could not be fetched or converted
├── InvalidRequestError      the caller's request is wrong; carries every problem found
│   ├── ContextLengthError   the prompt does not fit the model's context
│   └── LoRAError            the LoRA adapter cannot be served, or not by this engine
│       └── LoRACapacityError   all adapters that fit into memory are pinned or in use
├── DuplicateRequestError    the request id is in use
├── QueueFullError           the engine's own waiting queue is at its limit
├── EngineDrainingError      the engine finishes what it has and takes nothing more
├── RecompilationError       a step asked for a shape that was not compiled at the start
└── EngineDeadError          the core failed and cannot serve any more
"""

import traceback
from collections.abc import Sequence
from typing import Final, Literal

EngineDeathCause = Literal["crash", "out_of_memory", "recompilation"]


class HeadraceEngineError(Exception):
    """Base of all errors that the engine raises on purpose."""


class ConfigError(HeadraceEngineError, ValueError):
    """An engine option is wrong, or the machine cannot satisfy it."""


class ModelLoadError(HeadraceEngineError):
    """The model cannot be loaded or has no paged-attention path."""


class ModelFetchError(ModelLoadError):
    """The default model could not be brought into the cache."""


class InvalidRequestError(HeadraceEngineError, ValueError):
    """A request was refused at the door. `problems` holds one sentence for each thing that is wrong."""

    code = "invalid_request"

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("; ".join(self.problems))


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for a single generated token.

    The message holds "this model's maximum context length is", as OpenAI's and vLLM's do. Clients know the refusal
    by these words.
    """

    code = "context_length_exceeded"


class LoRAError(InvalidRequestError):
    """A LoRA adapter was refused; nothing of it is in use."""


class LoRACapacityError(LoRAError):
    """There is no room for one more adapter now; there may be when running requests have ended."""


class DuplicateRequestError(HeadraceEngineError, ValueError):
    """A request with this id is still unfinished."""


class QueueFullError(HeadraceEngineError):
    """The engine refuses more waiting requests; `option` names the bound that is reached and `limit` is its value."""

    def __init__(self, option: str, limit: int, waiting: str) -> None:
        self.option = option
        self.limit = limit
        super().__init__(f"the queue is full: {waiting}, and {option} is {limit}")


class EngineDrainingError(HeadraceEngineError):
    """The engine was told to drain and refuses new requests."""


class RecompilationError(HeadraceEngineError):
    """A device with static shapes was given a shape that it would have to compile while requests wait."""


class EngineDeadError(HeadraceEngineError):
    """The engine core stopped on a failure; its requests were not finished.

    `cause` is the reason as far as can be told: memory, of the device or of the machine; a `RecompilationError`; or
    anything else. `summary` is the message without the text of the error behind it, which may quote a request: what a
    log may show.
    """

    def __init__(self, message: str, *, cause: EngineDeathCause = "crash", summary: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.summary = message if summary is None else summary


NOTHING_MAY_FOLLOW: Final = "no token is left that may follow: the request's rules forbid them all"
"""Why a request ended whose own parameters contradict each other, which only its output shows."""


def raised_at(error: BaseException) -> str:
    """Where an error was raised, and its type: for a log. Its own text may quote a request, so it is left out."""
    return "".join([*traceback.format_tb(error.__traceback__), type(error).__name__])
