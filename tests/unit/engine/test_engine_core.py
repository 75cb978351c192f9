"""The core around the scheduler: refusals, KV sizing, and every interleaving of arrivals, aborts and steps."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace_engine.core.core_client import InProcessCore
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.errors import ConfigError, EngineDeadError, LoRACapacityError
from headrace_engine.options.speculative_config import SpeculativeConfig
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.request import EngineCoreRequest, FinishReason
from headrace_engine.runner.contracts import RunnerCapabilities
from unit.engine.fake_runner import BYTES_PER_BLOCK, MAX_MODEL_LEN, FakeRunner, fake_config, tokens_alone
from unit.engine.requests import Results, core_request, load_at_once

# Without the phase that explains a failure: on traces this long it takes minutes.
SEARCH = settings(max_examples=100, deadline=None, phases=[p for p in Phase if p is not Phase.explain])
CAPABILITIES = st.builds(
    lambda mixed_batches, **limits: RunnerCapabilities(mixed_batches=mixed_batches, lora=mixed_batches, **limits),
    mixed_batches=st.booleans(),
    max_prefills_per_step=st.sampled_from([None, 1, 2]),
    chunk_sizes=st.sampled_from([None, (3,), (4, 8)]),
    max_batch=st.sampled_from([None, 1, 3]),
    verifies_drafts=st.just(True),
    launches_ahead=st.just(True),
)
SPECULATIVE = st.one_of(
    st.none(),
    st.builds(
        SpeculativeConfig,
        method=st.sampled_from(["ngram", "draft_model"]),
        num_speculative_tokens=st.sampled_from([1, 3, 9]),
        prompt_lookup_min=st.just(1),
        prompt_lookup_max=st.just(2),
    ),
)
# Without num_blocks the fake's KV memory has slots for more states than anything needs, for three, and for one.
STATES = (1, 10 * BYTES_PER_BLOCK, 32 * BYTES_PER_BLOCK)
# Few letters and few lengths, so that prefixes collide and blocks are shared, filled and evicted all the time.
PROMPTS = st.builds(
    lambda prefix, tail: [*([1, 2, 3, 4] * 4)[:prefix], *tail],
    st.sampled_from([0, 4, 7, 8, 12]),
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
)


@st.composite
def cores(draw: st.DrawFn) -> tuple[EngineCore, FakeRunner]:
    caps = draw(CAPABILITIES)
    bytes_per_state = draw(st.sampled_from([0, 0, *STATES]))
    speculative = None if bytes_per_state else draw(SPECULATIVE)
    least = MAX_MODEL_LEN // 4 + 1
    config = fake_config(
        num_blocks=draw(st.sampled_from([least, least + 3, least + 12, 100, None])),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([1, 3, 7, 16, 64])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        prefix_caching=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.3])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 2, 5])),
        speculative=speculative,
        async_scheduling=speculative is None and not bytes_per_state and draw(st.booleans()),
    )
    drafting = config.speculative is not None and config.speculative.method == "draft_model"
    runner = FakeRunner(
        caps=caps,
        bytes_per_state=bytes_per_state,
        max_tokens_per_step=config.scheduler.max_num_batched_tokens,
        max_requests=config.scheduler.max_num_seqs,
        num_drafts=config.speculative.num_speculative_tokens if config.speculative and drafting else 0,
        max_adapters=config.lora.max_loras if config.lora else 0,
        waits_at=draw(st.sampled_from([lambda _: False, lambda number: number % 3 == 0])),
        redraws_at=draw(st.sampled_from([lambda _: False, lambda number: number % 2 == 0])),
    )
    core = EngineCore(config, runner)
    if core.loras is not None:
        load_at_once(core.loras)
    return core, runner


@st.composite
def messages(draw: st.DrawFn, name: str, *, with_adapters: bool) -> EngineCoreRequest:
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 20)))
    message = core_request(
        name,
        draw(PROMPTS),
        seed=draw(st.integers(0, 3)),
        priority=draw(st.integers(0, 2)),
        arrival_time=float(draw(st.integers(0, 5))),
        cache_salt=draw(st.sampled_from(["", "", "other"])),
        lora=draw(st.sampled_from([None, "a", "b", "c"])) if with_adapters else None,
        max_tokens=max_tokens,
        min_tokens=min(draw(st.sampled_from([0, 0, 3])), max_tokens or 3),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([[], [], [11, 12, 13]])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )
    whole = tokens_alone(message)
    message.output_token_ids = whole[: draw(st.sampled_from([0, 0, len(whole) - 1]))]
    return message


def prompt_logprobs_of(message: EngineCoreRequest) -> list[list[tuple[int, float, int]]] | None:
    """What the core must report of a prompt; a request that resumes has had it."""
    if message.sampling_params.prompt_logprobs is None or message.output_token_ids:
        return None
    return [[(token_id, float(-position), 1)] for position, token_id in enumerate(message.prompt_token_ids) if position]


class EngineMachine(RuleBasedStateMachine):
    """Whatever comes and goes, everybody gets the tokens that they would get alone."""

    @initialize(made=cores())
    def start(self, made: tuple[EngineCore, FakeRunner]) -> None:
        self.core, self.runner = made
        self.results = Results()
        self.expected: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[list[tuple[int, float, int]]] | None] = {}
        self.aborted: set[str] = set()
        self.added = 0

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        message = data.draw(messages(f"r{self.added:02}", with_adapters=self.core.loras is not None))
        self.added += 1
        self.expected[message.request_id] = tokens_alone(message)[len(message.output_token_ids) :]
        self.prompt_logprobs[message.request_id] = prompt_logprobs_of(message)
        self.core.add_request(message)
        self.core.check_integrity()

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        gone = data.draw(st.sets(st.sampled_from(sorted(self.expected)), max_size=2))
        self.aborted |= gone - set(self.results.finished)
        self.core.abort_requests(gone)
        self.core.check_integrity()

    @precondition(lambda self: self.core.loras is not None)
    @rule(name=st.sampled_from("abc"), method=st.sampled_from(["remove_lora", "add_lora", "reload"]))
    def change_adapters(self, name: str, method: str) -> None:
        request = LoRARequest(name, lora_path=f"/{name}", load_inplace=method == "reload")
        if method == "remove_lora":
            self.core.call(method, request.lora_int_id).result()
        else:
            with contextlib.suppress(LoRACapacityError):
                self.core.call("add_lora", request.to_wire()).result()
        self.core.check_integrity()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.core.has_work():
                self.results.step(self.core)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        tokens = sum(len(t) for t in self.expected.values()) + 32 * len(self.expected)
        self.results.drain(self.core, most_steps=4 * tokens + 10)
        assert set(self.results.finished) == set(self.expected) - self.aborted
        for name, tokens_expected in self.expected.items():
            found = self.results.tokens.get(name, [])
            if name in self.aborted:
                assert found == tokens_expected[: len(found)]
            else:
                assert found == tokens_expected
                assert self.results.prompt_logprobs.get(name) == self.prompt_logprobs[name]
        pool = self.core.scheduler.kv.pool
        assert pool.num_free == pool.num_usable
        assert self.runner.known == {}
        if self.core.loras is not None:
            assert len(self.runner.adapters) == len(self.core.call("list_loras").result())


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(SEARCH, stateful_step_count=20)


@given(made=cores(), data=st.data())
@settings(SEARCH)
def test_a_burst_of_requests_ends_with_the_tokens_that_each_gets_alone(
    made: tuple[EngineCore, FakeRunner], data: st.DataObject
) -> None:
    core, _ = made
    burst = [
        data.draw(messages(f"r{index}", with_adapters=core.loras is not None))
        for index in range(data.draw(st.integers(4, 10)))
    ]
    for message in burst:
        core.add_request(message)
    results = Results().drain(core)
    assert results.tokens == {m.request_id: tokens_alone(m)[len(m.output_token_ids) :] for m in burst}
    for message in burst:
        assert results.prompt_logprobs.get(message.request_id) == prompt_logprobs_of(message)


def test_prompt_logprobs_are_complete_in_chunks_behind_a_cached_prefix_and_over_preemptions() -> None:
    core = EngineCore(fake_config(num_blocks=10, max_num_batched_tokens=3, max_num_seqs=4), FakeRunner())
    prompt = [1, 2, 3, 4] * 5
    core.add_request(core_request("plain", prompt, max_tokens=2, ignore_eos=True))
    Results().drain(core)  # its blocks are in the prefix cache now
    burst = [
        core_request(name, prompt, max_tokens=11, ignore_eos=True, prompt_logprobs=wanted, seed=seed)
        for seed, (name, wanted) in enumerate([("a", None), ("b", 0), ("c", 0), ("d", None)])
    ]
    for message in burst:
        core.add_request(message)
    results = Results().drain(core)
    assert results.preemptions > 0
    assert results.prompt_logprobs == {name: prompt_logprobs_of(burst[1]) for name in ("b", "c")}
    assert results.cached["b"] == results.cached["c"] == 0
    assert results.cached["a"] > 0
    assert results.tokens == {message.request_id: tokens_alone(message) for message in burst}


def test_a_request_that_no_token_can_be_chosen_for_ends_alone() -> None:
    core = EngineCore(fake_config(), FakeRunner(refuse_token=50))
    message = core_request("a", max_tokens=5)
    core.add_request(message)
    core.add_request(core_request("b", [50], prompt_logprobs=0))
    results = Results().drain(core)
    assert results.errors == {"b": "no token"}
    assert results.tokens == {"a": tokens_alone(message), "b": []}


def test_an_output_that_runs_in_circles_ends_with_the_word_for_it() -> None:
    core = EngineCore(fake_config(), FakeRunner())
    circles = [5, 6] * 3
    detection = {"max_pattern_size": 2, "min_count": 3}
    # As after a crash: the last token of an earlier attempt is looked at first.
    core.add_request(core_request("a", output=circles, max_tokens=20, repetition_detection=detection))
    core.add_request(core_request("b", output=circles, max_tokens=20, repetition_detection=detection, min_tokens=7))
    core.add_request(core_request("c", output=circles[:5], max_tokens=20, repetition_detection=detection))
    results = Results().drain(core)
    assert (results.finished["a"], results.stop_reasons["a"]) == (FinishReason.REPETITION, "repetition_detected")
    assert len(results.tokens["b"]) >= 1
    assert len(results.tokens["c"]) >= 1


def test_a_refused_request_is_answered_with_an_error_and_disturbs_nobody() -> None:
    core = EngineCore(fake_config(max_num_queued_requests=1), FakeRunner())
    first = core_request("a", max_tokens=3)
    core.add_request(first)
    core.add_request(core_request("b"))
    results = Results().drain(core)
    assert results.finished["b"] is FinishReason.ERROR
    assert results.errors == {"b": "the queue is full: 1 requests wait, and max_num_queued_requests is 1"}
    assert results.tokens["a"] == tokens_alone(first)


def test_a_refusal_is_work_even_when_nothing_runs() -> None:
    core = EngineCore(fake_config(max_num_queued_requests=1), FakeRunner())
    core.add_request(core_request("a", max_tokens=1))
    core.add_request(core_request("a", max_tokens=1))
    core.abort_requests(["a"])
    assert core.has_work()
    assert Results().drain(core).finished == {"a": FinishReason.ERROR}


def test_a_request_that_is_complete_already_ends_without_another_token() -> None:
    # A worker may die between its last token and the output that says that it was the last one.
    core = EngineCore(fake_config(), FakeRunner())
    core.add_request(core_request("length", [1], output=[2, 3], max_tokens=2))
    core.add_request(core_request("end", [1], output=[2, 7], max_tokens=20))
    core.add_request(core_request("stop", [1], output=[2, 9], max_tokens=20, stop_token_ids=[9]))
    core.add_request(core_request("context", [1], output=[2] * (MAX_MODEL_LEN - 1), max_tokens=None))
    results = Results().drain(core)
    assert results.finished == {
        "length": FinishReason.LENGTH,
        "end": FinishReason.STOP,
        "stop": FinishReason.STOP,
        "context": FinishReason.LENGTH,
    }
    assert results.stop_reasons["stop"] == 9
    assert not any(results.tokens.values())


@pytest.mark.parametrize("prompt", [[], [1] * MAX_MODEL_LEN])
def test_a_prompt_that_no_step_could_compute_is_refused_and_does_not_kill_the_core(
    prompt: list[int],
) -> None:
    core = EngineCore(fake_config(), FakeRunner())
    core.add_request(core_request("a", prompt))
    results = Results().drain(core)
    assert results.errors["a"] == f"the request has {len(prompt)} tokens, must have at least 1 and less than 32"


def test_a_cache_too_small_for_one_request_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=32 tokens needs 9 KV blocks .* but num_blocks gives 8"):
        EngineCore(fake_config(num_blocks=8), FakeRunner())


def test_a_cache_larger_than_the_free_memory_is_refused_with_the_numbers() -> None:
    runner = FakeRunner()
    with pytest.raises(ConfigError, match=r"num_blocks asks for \d+ MiB of KV memory, but only \d+ MiB are free"):
        EngineCore(fake_config(num_blocks=1001), runner)
    EngineCore(fake_config(num_blocks=1000), runner)


def test_without_a_stated_size_the_cache_is_no_larger_than_all_requests_need() -> None:
    runner = FakeRunner()
    EngineCore(fake_config(num_blocks=None, max_num_seqs=2), runner)
    assert runner.num_blocks == 2 * 8 + 1
    EngineCore(fake_config(num_blocks=None, max_num_seqs=100), runner)
    assert runner.num_blocks == 64  # what the runner's default memory holds


def test_the_core_in_this_process_serves_and_ends() -> None:
    core = InProcessCore(fake_config())
    message = core_request("a", max_tokens=4)
    core.add_request(message)
    tokens: list[int] = []
    finished = False
    while not finished:
        outputs = core.get_outputs()
        assert outputs is not None
        for news in outputs.outputs:
            tokens += news.new_token_ids
            finished = news.finish_reason is not None
    assert tokens == tokens_alone(message)
    core.shutdown()
    assert core.get_outputs() is None


def test_a_runner_that_fails_in_this_process_leaves_a_dead_engine() -> None:
    core = InProcessCore(fake_config(model="fails"))
    core.add_request(core_request("a", [13]))
    with pytest.raises(EngineDeadError, match="the fake device failed"):
        core.get_outputs()
    core.add_request(core_request("b", [1]))
    with pytest.raises(EngineDeadError):
        core.get_outputs()
