"""Headrace's engine: continuous batching with paged attention, as a library.

Knows nothing about queues, Redis and Prometheus. The public names are loaded on first use, so that an import of the
package is fast and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace_engine.openmp import limit_spinning

if TYPE_CHECKING:
    from headrace_engine.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from headrace_engine.beam_search import BeamSearchOutput as BeamSearchOutput
    from headrace_engine.beam_search import BeamSearchParams as BeamSearchParams
    from headrace_engine.beam_search import BeamSearchSequence as BeamSearchSequence
    from headrace_engine.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from headrace_engine.engine_args import EngineArgs as EngineArgs
    from headrace_engine.input_processor import TextPrompt as TextPrompt
    from headrace_engine.input_processor import TokensPrompt as TokensPrompt
    from headrace_engine.llm import LLM as LLM
    from headrace_engine.llm_engine import LLMEngine as LLMEngine
    from headrace_engine.logits_processor import LogitsProcessor as LogitsProcessor
    from headrace_engine.lora_request import LoRARequest as LoRARequest
    from headrace_engine.outputs import CompletionOutput as CompletionOutput
    from headrace_engine.outputs import RequestOutput as RequestOutput
    from headrace_engine.sampling_params import RepetitionDetectionParams as RepetitionDetectionParams
    from headrace_engine.sampling_params import RequestOutputKind as RequestOutputKind
    from headrace_engine.sampling_params import SamplingParams as SamplingParams
    from headrace_engine.structured_outputs_params import StructuredOutputsParams as StructuredOutputsParams

limit_spinning()  # before anything imports torch

_HOMES = {
    "LLM": "llm",
    "AsyncEngineArgs": "engine_args",
    "AsyncLLMEngine": "async_llm",
    "BeamSearchOutput": "beam_search",
    "BeamSearchParams": "beam_search",
    "BeamSearchSequence": "beam_search",
    "CompletionOutput": "outputs",
    "EngineArgs": "engine_args",
    "LLMEngine": "llm_engine",
    "LogitsProcessor": "logits_processor",
    "RepetitionDetectionParams": "sampling_params",
    "LoRARequest": "lora_request",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "structured_outputs_params",
    "TextPrompt": "input_processor",
    "TokensPrompt": "input_processor",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
