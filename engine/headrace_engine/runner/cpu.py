"""The CPU runner: transformers' modelling code, packed batches, paged attention, prepacked linear layers."""

import logging
import os
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from headrace_engine.config import EngineConfig
from headrace_engine.errors import ConfigError
from headrace_engine.runner import models, packed_linear
from headrace_engine.runner.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from headrace_engine.runner.attention.native import NativeBackend
from headrace_engine.runner.attention.reference import ReferenceBackend
from headrace_engine.runner.batch import RequestBatch, StepInputs
from headrace_engine.runner.contracts import Capabilities, KVSpec, ModelInfo, StepBatch, StepOutput
from headrace_engine.runner.sampler import sample

logger = logging.getLogger(__name__)

# Without a stated budget the KV cache takes at most this share of free memory, and at most this many bytes.
_DEFAULT_KV_SHARE = 0.25
_DEFAULT_KV_LIMIT = 4 << 30


class CPURunner:
    """Implements `ModelRunner` on the CPU in float32 or bfloat16."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model: PreTrainedModel
        self._backend: AttentionBackend
        self._batch: RequestBatch
        self._spec: AttentionSpec
        self._info: ModelInfo
        self._metadata: AttentionMetadata | None = None

    def load_model(self) -> ModelInfo:
        started = time.perf_counter()
        config = self._config.model
        hf_config = models.load_config(config)
        dtype = models.resolve_dtype(config, hf_config)
        max_model_len = models.resolve_max_model_len(config, hf_config)
        self._spec = models.attention_spec(hf_config, self._config.cache.block_size, dtype)
        self._backend = _choose_backend(config.attention_backend, self._spec)
        self._model = models.load_weights(config, hf_config, self._attention)
        num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        packed = packed_linear.pack_linear_layers(self._model) if packed_linear.supports(dtype) else 0
        self._info = ModelInfo(
            vocab_size=hf_config.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=models.eos_token_ids(self._model, hf_config),
            architecture=type(self._model).__name__,
            dtype=str(dtype).removeprefix("torch."),
            device="cpu",
            attention=self._backend.name,
            num_parameters=num_parameters,
        )
        logger.info(
            "loaded %s: %.0f M parameters, %s, %s attention, %d packed layers, %.1f s",
            self._info.architecture,
            num_parameters / 1e6,
            self._info.dtype,
            self._info.attention,
            packed,
            time.perf_counter() - started,
        )
        return self._info

    def capabilities(self) -> Capabilities:
        return Capabilities()

    def kv_spec(self) -> KVSpec:
        return KVSpec(
            block_size=self._spec.block_size,
            bytes_per_block=self._spec.bytes_per_block,
            default_memory=min(int(_available_memory() * _DEFAULT_KV_SHARE), _DEFAULT_KV_LIMIT),
        )

    def init_kv_cache(self, num_blocks: int) -> None:
        self._backend.allocate(num_blocks)
        blocks_per_seq = -(-self._info.max_model_len // self._spec.block_size)
        self._batch = RequestBatch(self._config.scheduler.max_num_seqs, blocks_per_seq, self._spec.block_size)

    def warm_up(self) -> None:
        """Nothing to compile: the kernel was built when the backend was chosen."""

    @torch.inference_mode()
    def execute_model(self, batch: StepBatch) -> StepOutput:
        started = time.perf_counter()
        self._batch.update(batch)
        if not batch.num_scheduled_tokens:
            return StepOutput(sampled_token_ids={})
        inputs = self._batch.prepare(batch)
        prepared = time.perf_counter()
        logits = self._forward(inputs)
        forwarded = time.perf_counter()
        token_ids, logprobs = sample(logits, self._batch.sampling_rows(inputs.sampled_ids))
        self._batch.append_tokens(inputs.sampled_ids, token_ids)
        sampled = time.perf_counter()
        return StepOutput(
            sampled_token_ids={i: [token] for i, token in zip(inputs.sampled_ids, token_ids, strict=True)},
            logprobs={inputs.sampled_ids[index]: [entry] for index, entry in logprobs.items()},
            phase_seconds={
                "prepare": prepared - started,
                "forward": forwarded - prepared,
                "sample": sampled - forwarded,
            },
        )

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits of the sampled requests' last tokens, [sampled, vocabulary]."""
        self._metadata = inputs.metadata
        try:
            logits: torch.Tensor = self._model(
                input_ids=inputs.input_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                logits_to_keep=inputs.logits_indices,
            ).logits[0]
        finally:
            self._metadata = None
        return logits

    def _attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002  # causality is the backend's
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """What transformers calls in every layer: query [1, heads, tokens, dim] -> [1, tokens, heads, dim]."""
        assert self._metadata is not None
        layer = module.layer_idx
        assert isinstance(layer, int)
        output = self._backend.forward(
            layer,
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self._metadata,
            scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        return output[None], None

    def health(self) -> dict[str, Any]:
        return {"device": "cpu", "threads": torch.get_num_threads(), "requests": len(self._batch.requests)}

    def shutdown(self) -> None:
        """Nothing outlives the process."""


def _choose_backend(wanted: str, spec: AttentionSpec) -> AttentionBackend:
    if wanted == "torch":
        return ReferenceBackend(spec)
    reason = NativeBackend.unsupported_reason(spec)
    if reason is None:
        return NativeBackend(spec)
    if wanted == "native":
        raise ConfigError(f"attention_backend=native cannot be used: {reason}")
    logger.warning("attention runs in plain torch, which is many times slower: %s", reason)
    return ReferenceBackend(spec)


def _available_memory() -> int:
    """Bytes that can be had without swapping; the control group's limit where it is lower than the machine's."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:  # noqa: PTH123
            free = min(free, int(limit.read()) - int(used.read()))
    except (OSError, ValueError, StopIteration):
        pass  # no control group limit ("max"), or not Linux
    return free
