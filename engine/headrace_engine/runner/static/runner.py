"""`StaticPagedRunner`: runs steps of static shapes, for devices whose compilers need all shapes in advance.

Each step is padded to one of the shapes that were compiled during warm-up. Tokens are drawn on the device. Logits are
copied to the host only for rows whose sampling parameters the graph does not support.
"""

import logging
import time

import torch

from headrace_engine.checkpoints.checkpoint import fingerprint
from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.runner.batch import RequestBatch, StepInputs
from headrace_engine.runner.contracts import KVSpec, ModelInfo, RunnerCapabilities, StepBatch, StepOutput, TokenLogprobs
from headrace_engine.runner.models import generation, loading
from headrace_engine.runner.sampling.graph_sampling import needs_host
from headrace_engine.runner.sampling.request_processors import ProcessorSet
from headrace_engine.runner.sampling.sampler import SamplingRow, prompt_logprobs, sample
from headrace_engine.runner.static.compiler_backend import CompilerBackend
from headrace_engine.runner.static.group import Kind, WorkerRanks
from headrace_engine.runner.static.shapes import Shape, ShapeGrid, StaticInputs, empty_inputs, pad
from headrace_engine.runner.static.shard import ModelShard
from headrace_engine.runner.static.warm_up import warm_up
from headrace_engine.runner.static.weights import check_ranks, decoder_spec, read_generation_config

logger = logging.getLogger(__name__)


class StaticPagedRunner:
    """Implements `ModelRunner` with a fixed set of compiled shapes.

    Raises:
        ConfigError: the device does not exist, or an option does not fit it.
    """

    def __init__(self, config: EngineConfig, compiler_backend: CompilerBackend) -> None:
        compiler_backend.probe()
        self._config = config
        self._compiler_backend = compiler_backend
        self._shard: ModelShard
        self._worker_ranks: WorkerRanks | None = None
        self._grid: ShapeGrid
        self._batch: RequestBatch
        self.info: ModelInfo
        self.warm_up_seconds = 0.0

    def load_model(self) -> ModelInfo:
        started = time.perf_counter()
        size = self._config.static.tensor_parallel_size
        if size > 1:
            self._worker_ranks = self._start_worker_ranks(size)
        self._shard = part = ModelShard(
            self._config, self._compiler_backend, self._worker_ranks.group if self._worker_ranks else None
        )
        self._grid = ShapeGrid(self._config, part.max_model_len)
        generation_config = read_generation_config(self._config.model)
        self.info = ModelInfo(
            vocab_size=part.hf_config.vocab_size,
            max_model_len=part.max_model_len,
            eos_token_ids=generation.eos_token_ids(generation_config, part.hf_config, self._config.model.model),
            default_sampling_params=generation.default_sampling_params(self._config.model, generation_config),
            architecture=part.hf_config.architectures[0],
            dtype=str(part.dtype).removeprefix("torch."),
            device=self._compiler_backend.name,
            attention="static paged",
            num_parameters=part.num_parameters,
            weights=fingerprint(self._config.model.model, self._config.model.revision),
        )
        logger.info(
            "loaded %s on %d rank(s) of %s: %.0f M parameters, %s, %.1f s",
            self.info.architecture,
            size,
            self.info.device,
            self.info.num_parameters / 1e6,
            self.info.dtype,
            time.perf_counter() - started,
        )
        return self.info

    def _start_worker_ranks(self, size: int) -> WorkerRanks:
        if self._compiler_backend.collectives is None:
            raise ConfigError(
                f"tensor_parallel_size is {size}, but device {self._compiler_backend.name} has no collectives"
            )
        model = self._config.model
        # raises an error before any process is started
        check_ranks(decoder_spec(model.model, loading.load_config(model)), size)
        return WorkerRanks(self._config, self._compiler_backend.collectives)

    def capabilities(self) -> RunnerCapabilities:
        return RunnerCapabilities(
            mixed_batches=False,
            max_prefills_per_step=1,
            chunk_sizes=self._grid.prefill,
            max_batch=self._grid.decode[-1],
            logits_of_every_token=False,
        )

    def kv_spec(self) -> KVSpec:
        free = self._compiler_backend.free_memory()
        cache = self._config.cache
        if free is None and cache.kv_cache_memory is None and cache.num_blocks is None:
            raise ConfigError(
                f"device {self._compiler_backend.name} does not report its free memory: set kv_cache_memory"
            )
        return KVSpec(
            block_size=cache.block_size,
            bytes_per_block=self._shard.bytes_per_block,
            default_memory=free or 0,
            available_memory=free,
        )

    def init_kv_cache(self, num_blocks: int, num_states: int) -> None:  # noqa: ARG002  # refused at load
        block_size = self._config.cache.block_size
        if self._worker_ranks is not None:
            self._worker_ranks.group.announce(Kind.ALLOCATE, num_blocks, len(self._grid.shapes()))
        self._shard.allocate(num_blocks)
        blocks_per_seq = -(-self.info.max_model_len // block_size)
        self._batch = RequestBatch(
            self._config.scheduler.max_num_seqs, blocks_per_seq, block_size, ProcessorSet(self._config)
        )

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile every shape, so that no request waits for a compiler."""
        shapes = self._grid.shapes()
        self._shard.compile(len(shapes))

        def run(shape: Shape) -> None:
            choice, _ = self._run(empty_inputs(shape), Kind.WARM_UP)
            self._compiler_backend.to_host(choice)

        self.warm_up_seconds = warm_up(self._compiler_backend, shapes, run)

    @torch.no_grad()
    def execute_model(self, batch: StepBatch) -> StepOutput:
        started = time.perf_counter()
        self._batch.update(batch)
        if not batch.num_scheduled_tokens:
            return StepOutput(
                sampled_token_ids={},
                compiled_graphs=self._compiler_backend.num_graphs(),
                fallback_operators=len(self._compiler_backend.fallback_operators()),
                warm_up_seconds=self.warm_up_seconds,
            )
        packed = self._batch.prepare(batch)
        sampling = self._batch.sampling_rows(packed)
        indices = self._row_indices(batch, packed)
        shape = self._grid.choose(
            len(batch.num_scheduled_tokens),
            max(batch.num_scheduled_tokens.values()),
            int(packed.metadata.seq_lens.max()),
        )
        rows: list[SamplingRow | None] = [None] * len(batch.num_scheduled_tokens)
        for index, row in zip(indices, sampling, strict=True):
            rows[index] = row
        inputs = pad(packed, rows, shape, self._config.cache.block_size, self.info.vocab_size)
        prepared = time.perf_counter()
        choice, logits = self._run(inputs, Kind.STEP)
        on_host = self._compiler_backend.to_host(choice)
        forwarded = time.perf_counter()
        if batch.grammar_bitmask is not None:
            self._batch.restrict(sampling, packed, batch.grammar_bitmask.result())
        drawn, logprobs = self._take(on_host, logits, indices, sampling)
        accepted, errors = self._batch.accept(packed, drawn)
        return StepOutput(
            sampled_token_ids=accepted,
            logprobs=packed.by_request(logprobs, accepted) if logprobs else {},
            prompt_logprobs=self._prompt_logprobs(logits, batch, packed) if packed.prompt_targets else {},
            errors=errors,
            num_padded_tokens=shape.rows * shape.tokens - batch.num_tokens,
            compiled_graphs=self._compiler_backend.num_graphs(),
            fallback_operators=len(self._compiler_backend.fallback_operators()),
            warm_up_seconds=self.warm_up_seconds,
            phase_seconds={
                "prepare": prepared - started,
                "forward": forwarded - prepared,
                "sample": time.perf_counter() - forwarded,
            },
        )

    def _row_indices(self, batch: StepBatch, packed: StepInputs) -> list[int]:
        """Return the row of each request that gets a token."""
        sampled = set(packed.sampled_ids)
        return [row for row, request_id in enumerate(batch.num_scheduled_tokens) if request_id in sampled]

    def _run(self, inputs: StaticInputs, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
        if self._worker_ranks is not None:
            self._worker_ranks.group.send(kind, inputs)
        return self._shard.run(inputs, sealed=kind is Kind.STEP)

    def _take(
        self, choice: torch.Tensor, logits: torch.Tensor, indices: list[int], sampling: list[SamplingRow]
    ) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Return the tokens of the device. The host draws for rows that need it, and where candidates were too few."""
        drawn, exact = choice.tolist()
        token_ids = [drawn[index] for index in indices]
        by_host = [i for i, index in enumerate(indices) if not exact[index] or needs_host(sampling[i])]
        if not by_host:
            return token_ids, {}
        rows = self._compiler_backend.to_host(logits)[[indices[i] for i in by_host]]
        found, logprobs = sample(rows, [sampling[i] for i in by_host])
        for i, token_id in zip(by_host, found, strict=True):
            token_ids[i] = token_id
        return token_ids, {by_host[index]: entry for index, entry in logprobs.items()}

    def _prompt_logprobs(
        self, logits: torch.Tensor, batch: StepBatch, packed: StepInputs
    ) -> dict[str, list[TokenLogprobs]]:
        """Return prompt log-probabilities.

        Such prompts are computed token by token, so a row has the logits it needs.
        """
        found: dict[str, list[TokenLogprobs]] = {}
        rows = self._compiler_backend.to_host(logits)
        for index, request_id in enumerate(batch.num_scheduled_tokens):
            targets = packed.prompt_targets.get(request_id)
            if targets:
                count = self._batch.requests[request_id].params.prompt_logprobs
                assert count is not None and len(targets) == 1
                found[request_id] = prompt_logprobs(rows[index : index + 1], targets, count)
        return found

    def load_lora(self, version: int, request: LoRARequest) -> None:  # noqa: ARG002
        raise AssertionError("the core refuses adapters for a runner that says it serves none")

    def unload_lora(self, version: int) -> None:  # noqa: ARG002
        raise AssertionError("the core refuses adapters for a runner that says it serves none")

    def shutdown(self) -> None:
        if self._worker_ranks is not None:
            self._worker_ranks.close()
