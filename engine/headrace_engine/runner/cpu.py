"""The CPU runner: transformers' modelling code, packed batches, paged attention, prepacked linear layers."""

import logging
import time

import torch

from headrace_engine.options.config import EngineConfig
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.runner.batch import RequestBatch
from headrace_engine.runner.contracts import KVSpec, ModelInfo, RunnerCapabilities, StepBatch, StepOutput
from headrace_engine.runner.lora.layers import LoRALayers
from headrace_engine.runner.memory import available_memory
from headrace_engine.runner.models.draft_model import DraftModel
from headrace_engine.runner.models.paged_model import PagedModel
from headrace_engine.runner.sampling.request_processors import ProcessorSet
from headrace_engine.runner.sampling.sampler import sample

logger = logging.getLogger(__name__)

# By default the KV cache takes at most this share of the free memory, and at most this many bytes.
_DEFAULT_KV_SHARE = 0.25
_DEFAULT_KV_LIMIT = 4 << 30


class CPURunner:
    """Implements `ModelRunner` on the CPU in float32 or bfloat16."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model: PagedModel
        self._draft: DraftModel | None = None
        self._batch: RequestBatch
        self._lora: LoRALayers

    def load_model(self) -> ModelInfo:
        started = time.perf_counter()
        lora = self._config.lora is not None  # adapters hook into the modules of the layers
        self._model = PagedModel(self._config.model, self._config.cache, fuse_layers=not lora)
        if self._config.lora is not None:
            self._lora = self._model.enable_lora(self._config.lora.max_lora_rank)
        info = self._model.info
        logger.info(
            "loaded %s: %.0f M parameters, %s, %s attention, %d fused layers, %d packed products, "
            "%d weights in groups, %.1f s",
            info.architecture,
            info.num_parameters / 1e6,
            info.dtype,
            info.attention,
            self._model.num_fused,
            self._model.num_packed,
            self._model.num_grouped,
            time.perf_counter() - started,
        )
        speculative = self._config.speculative
        if speculative is not None and speculative.method == "draft_model":
            self._draft = DraftModel(self._config, info)
            logger.info("drafts by %s: %.0f M parameters", speculative.model, self._draft.info.num_parameters / 1e6)
        return info

    def capabilities(self) -> RunnerCapabilities:
        return RunnerCapabilities(verifies_drafts=True, lora=True)

    def kv_spec(self) -> KVSpec:
        free = available_memory()
        return KVSpec(
            bytes_per_state=self._model.bytes_per_state,
            block_size=self._model.spec.block_size,
            bytes_per_block=self._model.bytes_per_block + (self._draft.bytes_per_block if self._draft else 0),
            default_memory=min(int(free * _DEFAULT_KV_SHARE), _DEFAULT_KV_LIMIT),
            available_memory=free,
        )

    def init_kv_cache(self, num_blocks: int, num_states: int) -> None:
        self._model.allocate(num_blocks, num_states)
        if self._draft is not None:
            self._draft.allocate(num_blocks)
        blocks_per_seq = -(-self._model.info.max_model_len // self._model.spec.block_size)
        self._batch = RequestBatch(
            self._config.scheduler.max_num_seqs, blocks_per_seq, self._model.spec.block_size, ProcessorSet(self._config)
        )

    def warm_up(self) -> None:
        """Do nothing: the kernel was built when the backend was chosen."""

    @torch.inference_mode()
    def load_lora(self, version: int, request: LoRARequest) -> None:
        self._lora.load(version, request)

    def unload_lora(self, version: int) -> None:
        self._lora.unload(version)

    @torch.inference_mode()
    def execute_model(self, batch: StepBatch) -> StepOutput:
        started = time.perf_counter()
        self._batch.update(batch)
        self._model.restore_states(batch.new_requests)
        if not batch.num_scheduled_tokens:
            return StepOutput(sampled_token_ids={})
        inputs = self._batch.prepare(batch)
        prepared = time.perf_counter()
        logits = self._model.forward(inputs)
        forwarded = time.perf_counter()
        rows = self._batch.sampling_rows(inputs)
        if batch.grammar_bitmask is not None:
            self._batch.restrict(rows, inputs, batch.grammar_bitmask.result())
        drawn, logprobs = sample(logits[: len(rows)], rows)
        accepted, errors = self._batch.accept(inputs, drawn)
        prompt_entries = self._batch.prompt_logprobs(logits[len(rows) :], inputs)
        sampled = time.perf_counter()
        output = StepOutput(
            sampled_token_ids=accepted,
            logprobs=inputs.by_request(logprobs, accepted) if logprobs else {},
            prompt_logprobs=prompt_entries,
            errors=errors,
            phase_seconds={
                "prepare": prepared - started,
                "forward": forwarded - prepared,
                "sample": sampled - forwarded,
            },
        )
        if self._draft is not None:
            output.draft_token_ids = self._draft.propose(self._batch, batch, [i for i in accepted if i not in errors])
            output.phase_seconds["draft"] = time.perf_counter() - sampled
        return output

    def shutdown(self) -> None:
        """Do nothing: the end of the process frees everything."""
