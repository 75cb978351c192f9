"""Random workloads against transformers: whatever comes, goes and is taken away, no token is wrong and no block leaks.

`make fuzz` runs 500 workloads; the suite itself runs a few that are the same each time.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.model_families import VOCAB_SIZE
from engine.tiny_models import TinyModel
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.runner.cpu import CPURunner

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/core",
    "engine/headrace_engine/runner/models",
    "engine/headrace_engine/runner/attention",
    "engine/headrace_engine/runner/recurrent",
    "engine/headrace_engine/runner/cpu.py",
    "engine/headrace_engine/runner/batch.py",
)

EXAMPLES = int(os.environ.get("HEADRACE_FUZZ_EXAMPLES", "0"))
SEARCH = settings(
    max_examples=EXAMPLES or 24,
    derandomize=not EXAMPLES,
    deadline=None,
    # one model serves all examples; explaining a failure on traces this long takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
HYBRIDS = ("lfm2", "qwen3_5_text")
MODELS = ("llama", "mistral", "gemma2", *HYBRIDS)
MAX_MODEL_LEN = 96
BLOCK_SIZE = 16
LONGEST_OUTPUT = 16
BLOCKS_OF_ONE = MAX_MODEL_LEN // BLOCK_SIZE + 1


@cache
def prompts() -> list[list[int]]:
    """24 prompts of 1 to 76 tokens, most of which begin as another one does."""
    draw = random.Random(7)  # not pytest's seed: references are made once
    stem = [draw.randrange(3, VOCAB_SIZE) for _ in range(48)]
    return [
        [*stem[:shared], *(draw.randrange(3, VOCAB_SIZE) for _ in range(own))]
        for shared in (0, 8, 21, 48)
        for own in (1, 2, 7, 8, 17, 28)
    ]


class LoadedRunner(CPURunner):
    """Loads its model once for all the cores that are made around it."""

    _loaded: ModelInfo | None = None

    def load_model(self) -> ModelInfo:
        if self._loaded is None:
            self._loaded = super().load_model()
        return self._loaded


class Laboratory:
    """A model, its runner, and what each prompt gives alone."""

    def __init__(self, model: TinyModel, backend: str) -> None:
        self._args: dict[str, Any] = {
            "model": model.folder,
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "attention_backend": backend,
        }
        self._runner = LoadedRunner(EngineArgs(**self._args).create_engine_config())
        self.greedy = [model.generate(prompt, LONGEST_OUTPUT) for prompt in prompts()]
        self.sampled = [self._alone(index) for index in range(len(prompts()))]

    def core(self, **options: Any) -> EngineCore:
        config = EngineArgs(**self._args, **options).create_engine_config()
        self._runner._config = config
        return EngineCore(config, self._runner)

    def _alone(self, index: int) -> list[int]:
        core = self.core(num_blocks=100, enable_prefix_caching=False)
        core.add_request(Sent(index, sampled=True).message("alone", []))
        tokens: list[int] = []
        while core.has_work():
            tokens += [token for news in core.step().outputs for token in news.new_token_ids]
        return tokens

    def tokens(self, sent: Sent) -> list[int]:
        """All output tokens of the request, as transformers or the request alone gives them."""
        whole = (self.sampled if sent.sampled else self.greedy)[sent.prompt]
        tokens = whole[: sent.max_tokens]
        if sent.stop_at is not None and whole[sent.stop_at] in tokens:
            tokens = tokens[: tokens.index(whole[sent.stop_at]) + 1]
        return tokens

    def message(self, name: str, sent: Sent) -> EngineCoreRequest:
        """The request as the core gets it: a resumed one with what an earlier attempt has generated."""
        message = sent.message(name, (self.sampled if sent.sampled else self.greedy)[sent.prompt])
        message.output_token_ids = self.tokens(sent)[: self.resumed(sent)]
        return message

    def resumed(self, sent: Sent) -> int:
        return int(sent.resumed * (len(self.tokens(sent)) - 1))


@dataclass(frozen=True)
class Sent:
    """A request as the workload describes it."""

    prompt: int
    max_tokens: int = LONGEST_OUTPUT
    priority: int = 0
    sampled: bool = False
    stop_at: int | None = None
    """Position of the output token that is made a stop token."""
    resumed: float = 0.0
    """Share of its tokens that an earlier attempt generated."""

    def message(self, name: str, whole: list[int]) -> EngineCoreRequest:
        stops = [] if self.stop_at is None else [whole[self.stop_at]]
        return EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompts()[self.prompt],
            sampling_params=SamplingParams(
                temperature=1.0 if self.sampled else 0.0,
                top_p=0.9,
                presence_penalty=0.7 if self.sampled else 0.0,
                repetition_penalty=1.2 if self.sampled else 1.0,
                max_tokens=self.max_tokens,
                ignore_eos=True,
                stop_token_ids=stops,
            ),
            seed=self.prompt,
            priority=self.priority,
        )


@st.composite
def requests(draw: st.DrawFn) -> Sent:
    return Sent(
        prompt=draw(st.integers(0, len(prompts()) - 1)),
        max_tokens=draw(st.integers(1, LONGEST_OUTPUT)),
        priority=draw(st.integers(0, 2)),
        sampled=draw(st.booleans()),
        stop_at=draw(st.one_of(st.none(), st.integers(0, LONGEST_OUTPUT - 1))),
        resumed=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
    )


EVENTS = st.lists(
    st.one_of(
        requests(),
        requests(),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
    ),
    min_size=1,
    max_size=24,
)
# A single token is enough to look for, so that guesses are many and mostly wrong.
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
OPTIONS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([BLOCKS_OF_ONE, BLOCKS_OF_ONE + 4, BLOCKS_OF_ONE + 15, 100]),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.sampled_from([1, 5, 16, 40, 200]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.booleans(),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 6]),
        "watermark": st.sampled_from([0.0, 0.2]),
        "speculative_config": st.sampled_from([None, None, NGRAM]),
    }
)


@pytest.fixture(scope="module")
def laboratory(tiny_model: Callable[[str], TinyModel]) -> Callable[[str, str], Laboratory]:
    return cache(lambda name, backend: Laboratory(tiny_model(name), backend))


@given(name=st.sampled_from(MODELS), backend=st.sampled_from(["native", "torch"]), options=OPTIONS, events=EVENTS)
@SEARCH
def test_any_workload_gives_every_request_the_tokens_that_transformers_gives_it_alone(
    laboratory: Callable[[str, str], Laboratory], name: str, backend: str, options: dict[str, Any], events: list[Any]
) -> None:
    if name in HYBRIDS:
        options = {**options, "speculative_config": None}  # recurrent states cannot be taken back
    lab = laboratory(name, backend)
    core = lab.core(**options)
    sent: dict[str, Sent] = {}
    tokens: dict[str, list[int]] = {}
    finished: set[str] = set()
    aborted: set[str] = set()

    def step() -> None:
        for news in core.step().outputs:
            assert news.request_id not in finished | aborted, "an output of a request that has ended"
            tokens[news.request_id] += news.new_token_ids
            if news.finish_reason is not None:
                finished.add(news.request_id)
        core.check_integrity()

    for event in events:
        if isinstance(event, Sent):
            request_id = f"r{len(sent)}"
            sent[request_id], tokens[request_id] = event, []
            core.add_request(lab.message(request_id, event))
        elif event[0] == "step":
            for _ in range(event[1]):
                if core.has_work():
                    step()
        else:
            gone = {request_id for request_id in (f"r{event[1]}",) if request_id in sent} - finished
            core.abort_requests(gone)
            aborted |= gone
    steps = 0
    while core.has_work():
        assert steps < 20_000, "no progress"
        step()
        steps += 1

    assert finished == set(sent) - aborted
    for request_id, request in sent.items():
        expected = lab.tokens(request)[lab.resumed(request) :]
        found = tokens[request_id]
        assert found == (expected[: len(found)] if request_id in aborted else expected), request_id
    pool = core.scheduler.kv.pool
    assert pool.num_free == pool.num_usable
