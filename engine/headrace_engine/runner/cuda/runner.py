"""The GPU runner: transformers' models, paged attention in Triton, CUDA graphs for decode, sampling on the device.

The host packs a step, sends it with one copy, launches it, and waits once for the tokens. The code also runs on the
CPU, without graphs and pinned memory, for tests.
"""

import logging
import time

import torch

from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.runner.batch import RequestBatch, StepInputs
from headrace_engine.runner.contracts import KVSpec, LaunchedStep, ModelInfo, RunnerCapabilities, StepBatch, StepOutput
from headrace_engine.runner.cuda import device as gpu
from headrace_engine.runner.cuda.graphs import DecodeGraphs
from headrace_engine.runner.cuda.launched_step import CompleteStep, PendingStep
from headrace_engine.runner.cuda.sampling import DeviceSampler, draws_on_device
from headrace_engine.runner.cuda.step import DeviceSteps
from headrace_engine.runner.memory import available_memory, free_gpu_memory
from headrace_engine.runner.models.paged_model import PagedModel
from headrace_engine.runner.sampling.request_processors import ProcessorSet
from headrace_engine.runner.sampling.sampler import SamplingRow

logger = logging.getLogger(__name__)


class CUDARunner:
    """Implements `LaunchingRunner` on one GPU in float32 or bfloat16.

    Args:
        device: the device of the model; the CPU for tests.

    Raises:
        ConfigError: this runner does not support an option.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        _check_options(config)
        self._config = config
        self._device = device
        self._model: PagedModel
        self._batch: RequestBatch
        self._steps: DeviceSteps
        self._sampler: DeviceSampler
        self._graphs: DecodeGraphs | None = None
        self._in_flight: PendingStep | None = None
        """The last launched step, if the host has not waited for its tokens."""
        self._activations = 0
        self._warm_up_seconds = 0.0

    def load_model(self) -> ModelInfo:
        started = time.perf_counter()
        config = self._config
        self._model = PagedModel(config.model, config.cache, packed=False, device=self._device)
        info, scheduler = self._model.info, config.scheduler
        max_tokens = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        self._blocks_per_seq = -(-info.max_model_len // config.cache.block_size)
        self._steps = DeviceSteps(max_tokens, scheduler.max_num_seqs, self._blocks_per_seq, self._device)
        self._sampler = DeviceSampler(max_tokens, self._device)
        if info.attention == "triton":
            self._activations = self._measure_largest_step()
        logger.info(
            "loaded %s on %s: %.0f M parameters, %s, %s attention, %d fused layers, a step takes %d MiB, %.1f s",
            info.architecture,
            self._device,
            info.num_parameters / 1e6,
            info.dtype,
            info.attention,
            self._model.num_fused,
            self._activations >> 20,
            time.perf_counter() - started,
        )
        return info

    @torch.inference_mode()
    def _measure_largest_step(self) -> int:
        """Measure the memory of the largest step besides weights and K/V. Compiles the kernels for prompts too."""
        scheduler = self._config.scheduler
        self._model.allocate(1)
        inputs = self._steps.largest_prompt(
            scheduler.max_num_batched_tokens, self._model.info.max_model_len, scheduler.max_num_seqs
        )
        if not gpu.is_gpu(self._device):
            self._model.forward(inputs)
            return 0
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        logits = self._model.forward(inputs)
        sampling = 4 * logits.shape[0] * logits.shape[1] * 4  # four float32 copies of all logits
        del logits
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device)) - before + sampling

    def capabilities(self) -> RunnerCapabilities:
        return RunnerCapabilities(verifies_drafts=True, launches_ahead=True)

    def kv_spec(self) -> KVSpec:
        free = free_gpu_memory(self._device) if gpu.is_gpu(self._device) else available_memory()
        return KVSpec(
            block_size=self._model.spec.block_size,
            bytes_per_block=self._model.bytes_per_block,
            default_memory=gpu.kv_memory(free, self._activations),
            available_memory=free,
        )

    def init_kv_cache(self, num_blocks: int, num_states: int) -> None:  # noqa: ARG002  # refused at load
        self._model.allocate(num_blocks)
        scheduler = self._config.scheduler
        self._batch = RequestBatch(
            scheduler.max_num_seqs, self._blocks_per_seq, self._model.spec.block_size, ProcessorSet(self._config)
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the graphs of all sizes, so that no request waits for one."""
        if self._config.model.enforce_eager:
            return
        started = time.perf_counter()
        max_num_seqs = self._config.scheduler.max_num_seqs
        self._graphs = DecodeGraphs(max_num_seqs, self._steps.padding, self._model.forward, self._device)
        self._graphs.capture()
        self._warm_up_seconds = time.perf_counter() - started

    def execute_model(self, batch: StepBatch) -> StepOutput:
        return self.launch_model(batch).result()

    @torch.inference_mode()
    def launch_model(self, batch: StepBatch) -> LaunchedStep:
        started = time.perf_counter()
        self._batch.update(batch)
        self._steps.note_blocks(batch, self._batch.requests)
        if not batch.num_scheduled_tokens:
            return CompleteStep(StepOutput(sampled_token_ids={}))
        inputs = self._batch.prepare(batch)
        rows = None
        if self._in_flight is not None and not self._in_flight.has_arrived:
            rows = self._batch.sampling_rows(inputs)
            if not self._may_draw_ahead(batch, inputs, rows):  # such a step needs known tokens
                waiting = time.perf_counter()
                self._in_flight.result()
                self._batch.fill_in(inputs)
                started += time.perf_counter() - waiting
        prepared = time.perf_counter()
        logits, num_padded = self._forward(batch, inputs)
        launched = time.perf_counter()
        output = StepOutput(
            sampled_token_ids={},
            num_padded_tokens=num_padded,
            compiled_graphs=self._graphs.num_graphs if self._graphs else 0,
            warm_up_seconds=self._warm_up_seconds,
            # The device computes asynchronously. Its time counts as "sample", where the host waits for it.
            phase_seconds={"prepare": prepared - started, "forward": launched - prepared},
        )
        if rows is None:
            rows = self._batch.sampling_rows(inputs)
        if not self._may_draw_ahead(batch, inputs, rows):
            self._in_flight = None
            self._draw_now(batch, inputs, rows, logits, output)
            output.phase_seconds["sample"] = time.perf_counter() - launched
            return CompleteStep(output)
        drawn = self._sampler.draw_ahead(logits, rows)
        self._steps.drawn = drawn.tokens
        self._in_flight = PendingStep(drawn, self._batch.expect(inputs), output)
        return self._in_flight

    def _may_draw_ahead(self, batch: StepBatch, inputs: StepInputs, rows: list[SamplingRow]) -> bool:
        """Whether the device can draw all tokens of a step without the host."""
        if batch.grammar_bitmask is not None or batch.draft_token_ids or inputs.prompt_targets:
            return False
        if any(self._batch.requests[request_id].needs_tokens for request_id in inputs.sampled_ids):
            return False
        return all(map(draws_on_device, rows))

    def _draw_now(
        self, batch: StepBatch, inputs: StepInputs, rows: list[SamplingRow], logits: torch.Tensor, output: StepOutput
    ) -> None:
        if batch.grammar_bitmask is not None:
            self._batch.restrict(rows, inputs, batch.grammar_bitmask.result())
        tokens, logprobs = self._sampler.sample(logits, rows)
        output.sampled_token_ids, output.errors = self._batch.accept(inputs, tokens)
        if logprobs:
            output.logprobs = inputs.by_request(logprobs, output.sampled_token_ids)
        output.prompt_logprobs = self._batch.prompt_logprobs(logits[len(rows) :], inputs)

    def _forward(self, batch: StepBatch, inputs: StepInputs) -> tuple[torch.Tensor, int]:
        """Return the logits in the order of `inputs.logits_indices`, and the number of padding tokens."""
        num_seqs = len(inputs.metadata.seq_lens)
        if self._graphs is None or batch.num_tokens != num_seqs or inputs.prompt_targets:
            return self._model.forward(self._steps.to_device(inputs)), 0
        size = self._graphs.size_for(num_seqs)
        logits = self._graphs.run(self._steps.to_device_padded(inputs, size))
        if len(inputs.logits_indices) != num_seqs:  # for example the second to last token of a prompt
            logits = logits[inputs.logits_indices.to(self._device)]
        return logits, size - num_seqs

    def load_lora(self, version: int, request: LoRARequest) -> None:  # noqa: ARG002
        raise AssertionError("the core refuses adapters for a runner that says it serves none")

    def unload_lora(self, version: int) -> None:  # noqa: ARG002
        raise AssertionError("the core refuses adapters for a runner that says it serves none")

    def shutdown(self) -> None:
        """Do nothing: the end of the process frees everything."""


def _check_options(config: EngineConfig) -> None:
    if config.speculative is not None and config.speculative.method == "draft_model":
        raise ConfigError("speculative_config.method must be ngram on device cuda, got draft_model")
