"""`LogitsProcessor`: the base class for user code between the model and the sampler.

    class Shout(LogitsProcessor):
        extra_args = ("shout",)

        def new_req_logits_processor(self, params):
            if not (params.extra_args or {}).get("shout"):
                return None                                  # does not apply to this request

            def process(output_token_ids, logits):           # logits: [vocabulary] float32
                logits[self.quiet_token_ids] = float("-inf")
                return logits

            return process

    LLM(model, logits_processors=["my_package.my_module:Shout"])

The core may run in a child process, so it creates the instances itself. Therefore processors are named by their import
paths. A class that can be imported may be passed itself. As in vLLM, `SamplingParams.extra_args` has the arguments for
processors. Imports no torch.
"""

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    RequestLogitsProcessor: TypeAlias = (
        Callable[[Sequence[int], torch.Tensor], torch.Tensor]
        | Callable[[Sequence[int], Sequence[int], torch.Tensor], torch.Tensor]
    )
    """(output token ids, logits) or (prompt token ids, output token ids, logits) -> logits.

    `logits` is the row of one request, [vocabulary] float32. Minus infinity forbids a token. The function may change
    the row in place, and must return it. The result must depend only on the arguments: after a preemption or a crash, a
    new function continues a request that has output already.
    """


class LogitsProcessor:
    """Base class of logits processors. The core creates one instance, which lives as long as the model."""

    extra_args: ClassVar[Sequence[str]] = ()
    """The names in `SamplingParams.extra_args` that this processor reads."""

    def __init__(self, config: EngineConfig) -> None:
        """Called once, after the model has been loaded."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError with a message for the user if values are invalid. Called before the request is accepted."""

    def new_req_logits_processor(self, params: SamplingParams) -> "RequestLogitsProcessor | None":
        """Return the function for one request, or None if the processor does not apply to it."""
        raise NotImplementedError(f"{type(self).__qualname__} has no new_req_logits_processor")


def import_path(processor: str | type[LogitsProcessor]) -> str:
    """Return the import path `package.module:Class`."""
    return processor if isinstance(processor, str) else f"{processor.__module__}:{processor.__qualname__}"


def load_logits_processors(paths: Sequence[str]) -> list[type[LogitsProcessor]]:
    """Import logits processors. Raises ConfigError that names the wrong path."""
    return [_load(path) for path in paths]


def _load(path: str) -> type[LogitsProcessor]:
    module, _, name = path.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"logits processor {path!r} cannot be imported ({error}); the path is package.module:Class, "
            "and the core's process must be able to import it"
        ) from error
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ConfigError(f"logits processor {path!r} is not a subclass of headrace_engine.LogitsProcessor")
    if found.new_req_logits_processor is LogitsProcessor.new_req_logits_processor:
        raise ConfigError(f"logits processor {path!r} does not define new_req_logits_processor")
    return found


def with_prompt(process: "RequestLogitsProcessor") -> Callable[..., "torch.Tensor"]:
    """Return the function with three arguments: (prompt token ids, output token ids, logits) -> logits."""
    if len(inspect.signature(process).parameters) >= 3:
        return process
    return lambda _, output_token_ids, logits: process(output_token_ids, logits)  # type: ignore[call-arg]
