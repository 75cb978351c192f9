"""The public protocol of logits processors: your own code between the model and the sampler.

    class Shout(LogitsProcessor):
        extra_args = ("shout",)

        def new_req_logits_processor(self, params):
            if not (params.extra_args or {}).get("shout"):
                return None                                  # this request is left alone

            def process(output_token_ids, logits):           # logits: [vocabulary] float32
                logits[self.quiet_token_ids] = float("-inf")
                return logits

            return process

    LLM(model, logits_processors=["my_package.my_module:Shout"])

The core may run in a child process and makes its own instances, so processors are named by import path; a class that
has one may be given itself. As in vLLM, a request reaches them through `SamplingParams.extra_args`. Imports no torch.
"""

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from headrace_engine.config import EngineConfig
from headrace_engine.errors import ConfigError
from headrace_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    RequestLogitsProcessor: TypeAlias = (
        Callable[[Sequence[int], torch.Tensor], torch.Tensor]
        | Callable[[Sequence[int], Sequence[int], torch.Tensor], torch.Tensor]
    )
    """(output token ids, logits) or (prompt token ids, output token ids, logits) -> logits.

    logits is one request's row, [vocabulary] float32; it may be changed in place and must be returned. The result must
    be a function of the arguments alone: after a preemption or a crash the function is made anew and gets a request
    that has output already. Minus infinity forbids a token.
    """


class LogitsProcessor:
    """Base class. One instance lives in the core for as long as its model."""

    extra_args: ClassVar[Sequence[str]] = ()
    """The names in `SamplingParams.extra_args` that this processor reads."""

    def __init__(self, config: EngineConfig) -> None:
        """Called once, after the model was loaded."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError with a sentence for the user when its values are wrong; called at the door."""

    def new_req_logits_processor(self, params: SamplingParams) -> "RequestLogitsProcessor | None":
        """The function for one request; None leaves it alone, and costs nothing. Every processor has its own."""
        raise NotImplementedError(f"{type(self).__qualname__} has no new_req_logits_processor")


def import_path(processor: str | type[LogitsProcessor]) -> str:
    """`package.module:Class`."""
    return processor if isinstance(processor, str) else f"{processor.__module__}:{processor.__qualname__}"


def load_logits_processors(paths: Sequence[str]) -> list[type[LogitsProcessor]]:
    """Raises ConfigError naming the path that leads to no processor."""
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
    """The function in its longer form: (prompt token ids, output token ids, logits) -> logits."""
    if len(inspect.signature(process).parameters) >= 3:
        return process
    return lambda _, output_token_ids, logits: process(output_token_ids, logits)  # type: ignore[call-arg]
