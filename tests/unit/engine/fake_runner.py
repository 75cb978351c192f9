"""A runner without a model that holds the core to its contract.

Every KV slot remembers which prefix was written into it, and every scheduled request reads all its earlier slots back.
So a block that two requests write, that is read before it is written, or that changes hands too early fails the step.
Every slot for recurrent states remembers the prefix after which it was written, so a step that starts from another
state fails too.
The next token is a hash of the seed and the whole token list: what a request must produce can be told without an
engine (`tokens_alone`), and no batch-mate, chunk, cache hit or preemption may change it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_engine.errors import LoRAError, ModelLoadError, RecompilationError
from headrace_engine.options.config import CacheConfig, EngineConfig, LoRAConfig, ModelConfig, SchedulerConfig
from headrace_engine.options.speculative_config import SpeculativeConfig
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.runner.contracts import (
    KVSpec,
    ModelInfo,
    NewRequest,
    RunnerCapabilities,
    StepBatch,
    StepOutput,
    TokenLogprobs,
)

VOCAB_SIZE = 61
NO_TOKEN = -1
EOS = 7
MAX_MODEL_LEN = 32
BYTES_PER_BLOCK = 1000
IMPORT_PATH = "unit.engine.fake_runner:create_runner"


def extend_digest(digest: bytes, token_id: int) -> bytes:
    return hashlib.blake2b(digest + token_id.to_bytes(8, "big"), digest_size=8).digest()


def digests(token_ids: Sequence[int], adapter: str = "") -> list[bytes]:
    """The identity of every prefix under an adapter, which is what the K/V of a position depend on."""
    chain, digest = [], adapter.encode()
    for token_id in token_ids:
        digest = extend_digest(digest, token_id)
        chain.append(digest)
    return chain


def draw(prefix: bytes, seed: int, suppressed: Sequence[int], mask: bytes | None = None) -> int:
    for attempt in range(10_000):
        word = hashlib.blake2b(prefix + f"{seed}:{attempt}".encode(), digest_size=4).digest()
        token_id = int.from_bytes(word, "big") % VOCAB_SIZE
        allowed = token_id not in suppressed if mask is None else mask[token_id >> 3] >> (token_id & 7) & 1
        if allowed:
            return token_id
    raise AssertionError("everything is suppressed")


def tokens_alone(request: EngineCoreRequest, max_model_len: int = MAX_MODEL_LEN) -> list[int]:
    """All output tokens that this request gets when it is the only one."""
    params = request.sampling_params
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
    suppressed = {*params.stop_token_ids, *request.eos_token_ids}
    output = list(request.output_token_ids)
    adapter = request.lora_request.lora_name if request.lora_request else ""
    digest = digests([*request.prompt_token_ids, *output], adapter)[-1]
    while True:
        output.append(draw(digest, request.seed, sorted(suppressed) if len(output) < params.min_tokens else ()))
        digest = extend_digest(digest, output[-1])
        if len(output) >= params.min_tokens and output[-1] in ends:
            return output
        if params.max_tokens is not None and len(output) >= params.max_tokens:
            return output
        if len(request.prompt_token_ids) + len(output) >= max_model_len:
            return output


@dataclass
class Known:
    """A request as the runner remembers it."""

    arrival: NewRequest
    token_ids: list[int]
    chain: list[bytes]
    table: list[int]
    num_computed: int

    @property
    def missing(self) -> int:
        return len(self.token_ids) - self.num_computed

    def draw_next(self, mask: bytes | None = None) -> int:
        arrival = self.arrival
        short = len(self.token_ids) - arrival.num_prompt_tokens < arrival.sampling_params.min_tokens
        return draw(self.chain[-1], arrival.seed, arrival.suppressed_token_ids if short else (), mask)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.chain.append(extend_digest(self.chain[-1], token_id))


@dataclass
class FakeLaunched:
    """Implements `LaunchedStep`. The fake device has computed it already, and tells when it is asked, in order."""

    runner: FakeRunner
    output: StepOutput
    is_complete: bool

    def result(self) -> StepOutput:
        in_flight = self.runner.in_flight
        assert in_flight.pop(0) is self, "results are asked for in another order"
        if in_flight and not in_flight[0].is_complete and self.runner.redraws_at(len(self.runner.batches)):
            self._redraw(in_flight[0].output)
        return self.output

    def _redraw(self, behind: StepOutput) -> None:
        """As if the step behind had been computed with other tokens: what it wrote for them is none of theirs."""
        for request_id in self.output.sampled_token_ids.keys() & behind.sampled_token_ids.keys():
            request, size = self.runner.known[request_id], self.runner.block_size
            del behind.sampled_token_ids[request_id], request.token_ids[-1], request.chain[-1]
            request.num_computed -= 1
            block, place = divmod(request.num_computed, size)
            self.runner.slots[request.table[block] * size + place] = b"wrong"
            self.output.void_request_ids.append(request_id)


@dataclass
class FakeRunner:
    """Implements `LaunchingRunner`. `max_tokens_per_step` and `max_requests` are the limits that it enforces."""

    caps: RunnerCapabilities = field(default_factory=RunnerCapabilities)
    block_size: int = 4
    max_model_len: int = MAX_MODEL_LEN
    max_tokens_per_step: int = 1 << 30
    max_requests: int = 1 << 30
    fail_on_token: int | None = None
    """Raise when a request with this token in its prompt arrives."""
    failure: type[Exception] = RuntimeError
    num_drafts: int = 0
    """Tokens that the runner's own draft model guesses; about three of four are right."""
    refuse_token: int | None = None
    """Choose no token for a request with this token in its prompt."""
    known: dict[str, Known] = field(default_factory=dict)
    batches: list[StepBatch] = field(default_factory=list)
    slots: list[bytes | None] = field(default_factory=list)
    num_blocks: int = 0
    bytes_per_state: int = 0
    states: list[bytes | None] = field(default_factory=list)
    """By slot: the digest of the prefix after which it holds the recurrent state."""
    adapters: dict[int, str] = field(default_factory=dict)
    """Names by version."""
    max_adapters: int = 1 << 30
    """Most different adapters in one step."""
    in_flight: list[FakeLaunched] = field(default_factory=list)
    num_ahead: int = 0
    """Steps that were launched while another one was in flight."""
    waits_at: Callable[[int], bool] = lambda _: False
    """Which steps, by their numbers, the runner waits for at once."""
    padding: int = 0
    """Tokens of padding, and seconds, that each step reports."""
    redraws_at: Callable[[int], bool] = lambda _: False
    """With which steps in flight, by their numbers, the tokens before turn out to be others."""
    gate: threading.Event | None = None
    """What an adapter waits for while it is read."""

    def load_model(self) -> ModelInfo:
        return ModelInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            eos_token_ids=[EOS],
            architecture="Fake",
            dtype="float32",
            device="none",
            attention="none",
            num_parameters=0,
        )

    def capabilities(self) -> RunnerCapabilities:
        return self.caps

    def kv_spec(self) -> KVSpec:
        return KVSpec(
            block_size=self.block_size,
            bytes_per_block=BYTES_PER_BLOCK,
            default_memory=64 * BYTES_PER_BLOCK,
            available_memory=1000 * BYTES_PER_BLOCK,
            bytes_per_state=self.bytes_per_state,
        )

    def init_kv_cache(self, num_blocks: int, num_states: int) -> None:
        self.states = [None] * num_states
        self.num_blocks = num_blocks
        self.slots = [None] * (num_blocks * self.block_size)

    def warm_up(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def load_lora(self, version: int, request: LoRARequest) -> None:
        if self.gate is not None:
            assert self.gate.wait(20)
        if request.lora_path == "broken":
            raise LoRAError([f"LoRA adapter {request.lora_name!r}: it is broken", "in two ways"])
        if request.lora_path == "bug":
            raise RuntimeError("the fake loader failed")
        assert version not in self.adapters
        self.adapters[version] = request.lora_name

    def unload_lora(self, version: int) -> None:
        del self.adapters[version]

    def launch_model(self, batch: StepBatch) -> FakeLaunched:
        assert len(self.in_flight) < 2, "two steps are in flight already"
        self.num_ahead += bool(self.in_flight and batch.num_scheduled_tokens)
        output = self.execute_model(batch)
        must_wait = bool(output.errors or output.prompt_logprobs or batch.grammar_bitmask)
        is_complete = must_wait or not batch.num_scheduled_tokens or self.waits_at(len(self.batches))
        self.in_flight.append(FakeLaunched(self, output, is_complete))
        return self.in_flight[-1]

    def execute_model(self, batch: StepBatch) -> StepOutput:
        self.batches.append(batch)
        new = self._update(batch)
        self._check_limits(batch, new)
        self._write(batch, new)
        self._advance_states(batch)
        sampled: dict[str, list[int]] = {}
        prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        masks = batch.grammar_bitmask.result().masks if batch.grammar_bitmask is not None else {}
        for request_id, count in batch.num_scheduled_tokens.items():
            request = self.known[request_id]
            if request.arrival.num_prompt_logprobs is not None:
                prompt_logprobs[request_id] = self._prompt_logprobs(request, count)
            drafts = batch.draft_token_ids.get(request_id, [])
            request.num_computed += count - len(drafts)
            self._read(request)
            if not request.missing:
                sampled[request_id] = self._sample(request, drafts, masks.get(request_id))
        errors = {request_id: "no token" for request_id in sampled if self._is_refused(request_id)}
        sampled = {i: tokens for i, tokens in sampled.items() if i not in errors}
        stuck = {i: tokens[:-1] for i, tokens in sampled.items() if tokens[-1] == NO_TOKEN}
        sampled |= stuck
        errors |= dict.fromkeys(stuck, "no token")
        return StepOutput(
            sampled_token_ids=sampled,
            draft_token_ids={i: self._draft(self.known[i]) for i in sampled.keys() - errors.keys()}
            if self.num_drafts
            else {},
            prompt_logprobs=prompt_logprobs,
            errors=errors,
            phase_seconds={"forward": float(self.padding)} if batch.num_scheduled_tokens else {},
            num_padded_tokens=self.padding if batch.num_scheduled_tokens else 0,
            compiled_graphs=3 if batch.num_scheduled_tokens else 0,
        )

    def _is_refused(self, request_id: str) -> bool:
        return self.refuse_token is not None and self.refuse_token in self.known[request_id].arrival.token_ids

    def _prompt_logprobs(self, request: Known, count: int) -> list[TokenLogprobs]:
        """For each wanted prompt token: itself, with its position for a log-probability."""
        arrival = request.arrival
        assert arrival.num_prompt_logprobs is not None
        assert arrival.num_computed_tokens <= arrival.num_prompt_logprobs, "a cache hit hides logits that are wanted"
        first = max(request.num_computed, arrival.num_prompt_logprobs) + 1
        stop = min(request.num_computed + count + 1, arrival.num_prompt_tokens)
        return [[(request.token_ids[position], float(-position), 1)] for position in range(first, stop)]

    def _update(self, batch: StepBatch) -> set[str]:
        for request_id in batch.removed_request_ids:
            assert request_id in self.known, f"{request_id} is removed but was never here"
            del self.known[request_id]
        for arrival in batch.new_requests:
            assert arrival.request_id not in self.known, f"{arrival.request_id} arrives twice"
            assert arrival.request_id in batch.num_scheduled_tokens, "arrives without anything to compute"
            if self.fail_on_token is not None and self.fail_on_token in arrival.token_ids:
                raise self.failure(f"the fake device failed on {list(arrival.token_ids)}")
            self.known[arrival.request_id] = Known(
                arrival,
                list(arrival.token_ids),
                digests(arrival.token_ids, self._adapter(arrival)),
                list(arrival.block_ids),
                arrival.num_computed_tokens,
            )
            assert (arrival.state_slot is not None) == bool(self.states), "a slot exactly if there are states"
            if arrival.state_source is not None:
                assert arrival.state_slot is not None
                self.states[arrival.state_slot] = self.states[arrival.state_source]
        for request_id, block_ids in batch.new_block_ids.items():
            assert request_id in batch.num_scheduled_tokens, f"{request_id} gets blocks but computes nothing"
            self.known[request_id].table += block_ids
        for request_id, request in self.known.items():
            assert 0 not in request.table, f"{request_id} was given the null block"
            assert len(set(request.table)) == len(request.table)
            assert all(0 < block < self.num_blocks for block in request.table)
        return {arrival.request_id for arrival in batch.new_requests}

    def _adapter(self, arrival: NewRequest) -> str:
        return "" if arrival.lora_version is None else self.adapters[arrival.lora_version]

    def _check_limits(self, batch: StepBatch, new: set[str]) -> None:
        counts = batch.num_scheduled_tokens
        assert batch.num_tokens <= self.max_tokens_per_step, "over the token budget"
        assert len(self.known) <= self.max_requests, "more requests than the runner has rows for"
        assert len(counts) <= (self.caps.max_batch or len(counts)), "over max_batch"
        for request_id, count in counts.items():
            request = self.known[request_id]
            drafts = batch.draft_token_ids.get(request_id, [])
            assert not drafts or (request.missing == 1 and request_id not in new and self.caps.verifies_drafts)
            assert 1 <= count - len(drafts) <= request.missing, "computes nothing, or tokens that do not exist"
            needed = -(-(request.num_computed + count) // self.block_size)
            assert needed <= len(request.table) <= -(-self.max_model_len // self.block_size)
            if self.caps.chunk_sizes:
                assert count <= max(self.caps.chunk_sizes), "a chunk longer than the runner can take"
        versions = {self.known[i].arrival.lora_version for i in counts} - {None}
        assert len(versions) <= self.max_adapters, "more adapters than the runner takes in a step"
        assert versions <= self.adapters.keys(), "an adapter that is in use was unloaded"
        prefills = {i for i in counts if i in new or self.known[i].missing > 1}
        if self.caps.max_prefills_per_step is not None:
            assert len(prefills) <= self.caps.max_prefills_per_step
        if not self.caps.mixed_batches:
            assert not prefills or prefills == set(counts), "prefill and decode share a step"

    def _write(self, batch: StepBatch, new: set[str]) -> None:
        writer: dict[int, str] = {}
        for request_id, count in batch.num_scheduled_tokens.items():
            request = self.known[request_id]
            chain = list(request.chain)
            for token_id in batch.draft_token_ids.get(request_id, []):
                chain.append(extend_digest(chain[-1], token_id))
            for position in range(request.num_computed, request.num_computed + count):
                block = request.table[position // self.block_size]
                assert writer.setdefault(block, request_id) == request_id, f"block {block} has two writers"
                self.slots[block * self.block_size + position % self.block_size] = chain[position]
        for request_id, request in self.known.items():
            if request_id not in new:  # a new one may share what a batch-mate writes in this very step
                computed = request.table[: -(-request.num_computed // self.block_size)]
                overwritten = [block for block in computed if writer.get(block, request_id) != request_id]
                assert not overwritten, f"blocks {overwritten} of {request_id} were written by another request"

    def _advance_states(self, batch: StepBatch) -> None:
        """Compute on from each request's own state. Snapshots go where no running request has its state."""
        if not self.states:
            return
        owned = [request.arrival.state_slot for request in self.known.values()]
        assert len(set(owned)) == len(owned), "two requests have one slot"
        for request_id, count in batch.num_scheduled_tokens.items():
            request = self.known[request_id]
            slot, start = request.arrival.state_slot, request.num_computed
            assert slot is not None
            if start:
                assert self.states[slot] == request.chain[start - 1], f"{request_id} continues from another state"
            last = start
            for snapshot in batch.state_snapshots.get(request_id, []):
                assert last < snapshot.num_tokens <= start + count and snapshot.num_tokens % self.block_size == 0
                assert snapshot.slot not in owned, "a snapshot overwrites the state of a request"
                self.states[snapshot.slot] = request.chain[snapshot.num_tokens - 1]
                last = snapshot.num_tokens
            self.states[slot] = request.chain[start + count - 1]
        slots = [snapshot.slot for snapshots in batch.state_snapshots.values() for snapshot in snapshots]
        assert len(set(slots)) == len(slots), "two snapshots have one slot"

    def _read(self, request: Known) -> None:
        for position in range(request.num_computed):
            block = request.table[position // self.block_size]
            content = self.slots[block * self.block_size + position % self.block_size]
            assert content == request.chain[position], (
                f"position {position} of {request.arrival.request_id} is not there"
            )

    def _sample(self, request: Known, drafts: list[int], masks: list[bytes] | None) -> list[int]:
        assert masks is None or len(masks) == 1 + len(drafts), "not one mask a position"
        tokens = []
        for index, draft in enumerate([*drafts, None]):
            if masks is not None and not any(masks[index]):
                return [*tokens, NO_TOKEN]
            token_id = request.draw_next(masks[index] if masks is not None else None)
            request.append(token_id)
            tokens.append(token_id)
            if token_id != draft:
                break
            request.num_computed += 1
            self._read(request)
        return tokens

    def _draft(self, request: Known) -> list[int]:
        room = len(request.table) * self.block_size - len(request.token_ids) + 1
        guess = dataclasses.replace(request, token_ids=list(request.token_ids), chain=list(request.chain))
        for _ in range(min(self.num_drafts, room)):
            token_id = guess.draw_next()
            guess.append(token_id if guess.chain[-1][0] % 4 else (token_id + 1) % VOCAB_SIZE)
        return guess.token_ids[len(request.token_ids) :]


def fake_config(
    *,
    num_blocks: int | None = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    policy: str = "fcfs",
    prefix_caching: bool = True,
    watermark: float = 0.0,
    speculative: SpeculativeConfig | None = None,
    model: str = "fake",
    tokenizer: str = "unit.engine.letters:load_tokenizer",
    lora: LoRAConfig | None = None,
    **scheduler: Any,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model),
        cache=CacheConfig(num_blocks=num_blocks, enable_prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,  # type: ignore[arg-type]
            watermark=watermark,
            **scheduler,
        ),
        speculative=speculative,
        lora=lora,
        runner=IMPORT_PATH,
        tokenizer=tokenizer,
    )


def create_runner(config: EngineConfig) -> FakeRunner:
    """What a child process imports; the model's name chooses a misbehaviour."""
    name = config.model.model
    if name == "missing":
        raise ModelLoadError("model 'missing' cannot be read")
    if name == "dies":
        os._exit(3)
    if name == "grows":
        kept = []
        while True:
            kept.append(bytearray(b"x" * (8 << 20)))
    if name == "recompiles":
        return FakeRunner(fail_on_token=13, failure=RecompilationError)
    return FakeRunner(
        caps=RunnerCapabilities(lora=config.lora is not None),
        max_model_len=1 << 20 if name == "long" else MAX_MODEL_LEN,
        block_size=1 << 16 if name == "long" else 4,
        fail_on_token=13 if name == "fails" else None,
    )
