"""The exceptions of the engine.

HeadraceEngineError
├── ConfigError              an engine option is wrong or does not fit the machine
├── ModelLoadError           the model folder or name cannot be served
│   └── ModelFetchError      the default model could not be fetched or converted
├── InvalidRequestError      the request is invalid; has a list of all problems (in headrace_wire)
│   ├── ContextLengthError   the prompt does not fit the model's context
│   └── LoRAError            the LoRA adapter cannot be served, or not by this engine
│       └── LoRACapacityError   all adapters that fit in memory are pinned or in use
├── DuplicateRequestError    the request id is in use
├── EngineFullError          the engine's own waiting queue is at its limit
├── EngineDrainingError      the engine finishes its requests and accepts no more
├── RecompilationError       a step needs a shape that was not compiled at the start
└── EngineDeadError          the core failed and cannot serve any more
"""

import traceback
from typing import Final

from headrace_wire.codes import EngineDeathCause, ErrorCode
from headrace_wire.errors import HeadraceEngineError as HeadraceEngineError
from headrace_wire.errors import InvalidRequestError as InvalidRequestError


class ConfigError(HeadraceEngineError, ValueError):
    """An engine option is wrong, or the machine cannot satisfy it."""


class ModelLoadError(HeadraceEngineError):
    """The model cannot be loaded, or its attention cannot be paged."""


class ModelFetchError(ModelLoadError):
    """The default model could not be downloaded or converted."""


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for a single generated token.

    The message contains "this model's maximum context length is", like OpenAI's and vLLM's, because clients look for
    these words.
    """

    code = ErrorCode.CONTEXT_LENGTH_EXCEEDED


class LoRAError(InvalidRequestError):
    """A LoRA adapter was refused. No part of it is in use."""


class LoRACapacityError(LoRAError):
    """There is no room for another adapter until running requests end."""


class DuplicateRequestError(HeadraceEngineError, ValueError):
    """An unfinished request has the same id."""


class EngineFullError(HeadraceEngineError):
    """The queue of the engine is full. `option` is the option that sets the reached limit. `limit` is its value."""

    def __init__(self, option: str, limit: int, waiting: str) -> None:
        self.option = option
        self.limit = limit
        super().__init__(f"the queue is full: {waiting}, and {option} is {limit}")


class EngineDrainingError(HeadraceEngineError):
    """The engine drains and refuses new requests."""


class RecompilationError(HeadraceEngineError):
    """A device with static shapes would have to compile a shape while requests wait."""


class EngineDeadError(HeadraceEngineError):
    """The engine core failed. Its requests were not finished.

    `cause` is out_of_memory (of the device or the machine), recompilation (`RecompilationError`) or crash (anything
    else). `summary` is a message for logs. It omits the text of the original error, which may quote a request.
    """

    def __init__(self, message: str, *, cause: EngineDeathCause = "crash", summary: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.summary = message if summary is None else summary


NOTHING_MAY_FOLLOW: Final = "no token is left that may follow: the request's rules forbid them all"
"""The error of a request whose parameters contradict each other, which shows only during generation."""


def is_caused_by_request(error: str) -> bool:
    """Whether the request itself caused the error that ended it: its rules or its grammar cannot be followed."""
    return error == NOTHING_MAY_FOLLOW or error.startswith("structured_outputs: ")


def raised_at(error: BaseException) -> str:
    """Return where an error was raised, and its type, for a log. Omits its text, which may quote a request."""
    return "".join([*traceback.format_tb(error.__traceback__), type(error).__name__])
