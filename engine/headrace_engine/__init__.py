"""Headrace's engine: continuous batching with paged attention, as a library.

Knows nothing about queues, Redis and Prometheus. The public names are loaded on first use, so that an import of the
package is fast and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace_engine.system.openmp import set_defaults

if TYPE_CHECKING:
    from headrace_engine.api.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from headrace_engine.api.beam_search import BeamSearchOutput as BeamSearchOutput
    from headrace_engine.api.beam_search import BeamSearchParams as BeamSearchParams
    from headrace_engine.api.beam_search import BeamSearchSequence as BeamSearchSequence
    from headrace_engine.api.input_processor import TextPrompt as TextPrompt
    from headrace_engine.api.input_processor import TokensPrompt as TokensPrompt
    from headrace_engine.api.llm import LLM as LLM
    from headrace_engine.api.llm_engine import LLMEngine as LLMEngine
    from headrace_engine.options.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from headrace_engine.options.engine_args import EngineArgs as EngineArgs
    from headrace_engine.options.logits_processor import LogitsProcessor as LogitsProcessor
    from headrace_engine.requests.lora_request import LoRARequest as LoRARequest
    from headrace_engine.requests.outputs import CompletionOutput as CompletionOutput
    from headrace_engine.requests.outputs import RequestOutput as RequestOutput
    from headrace_engine.requests.pooling_outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from headrace_engine.requests.pooling_outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from headrace_engine.requests.pooling_outputs import ScoringRequestOutput as ScoringRequestOutput
    from headrace_engine.requests.pooling_params import PoolingParams as PoolingParams
    from headrace_engine.requests.sampling_params import RepetitionDetectionParams as RepetitionDetectionParams
    from headrace_engine.requests.sampling_params import RequestOutputKind as RequestOutputKind
    from headrace_engine.requests.sampling_params import SamplingParams as SamplingParams
    from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams as StructuredOutputsParams

set_defaults()  # before anything imports torch

_HOMES = {
    "LLM": "api.llm",
    "AsyncEngineArgs": "options.engine_args",
    "AsyncLLMEngine": "api.async_llm",
    "BeamSearchOutput": "api.beam_search",
    "BeamSearchParams": "api.beam_search",
    "BeamSearchSequence": "api.beam_search",
    "ClassificationRequestOutput": "requests.pooling_outputs",
    "CompletionOutput": "requests.outputs",
    "EmbeddingRequestOutput": "requests.pooling_outputs",
    "PoolingParams": "requests.pooling_params",
    "ScoringRequestOutput": "requests.pooling_outputs",
    "EngineArgs": "options.engine_args",
    "LLMEngine": "api.llm_engine",
    "LogitsProcessor": "options.logits_processor",
    "RepetitionDetectionParams": "requests.sampling_params",
    "LoRARequest": "requests.lora_request",
    "RequestOutput": "requests.outputs",
    "RequestOutputKind": "requests.sampling_params",
    "SamplingParams": "requests.sampling_params",
    "StructuredOutputsParams": "requests.structured_outputs_params",
    "TextPrompt": "api.input_processor",
    "TokensPrompt": "api.input_processor",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
