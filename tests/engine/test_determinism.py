"""The same seed gives the same tokens whatever else the engine does; with batch_invariant to the last bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.tiny_models import VOCAB_SIZE, TinyModel
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.errors import ConfigError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.batch import RequestBatch, TokenSpan
from headrace_engine.runner.contracts import NewRequest, TokenLogprobs
from headrace_engine.runner.models.paged_model import PagedModel
from headrace_engine.runner.sampling.request_processors import ProcessorSet
from headrace_engine.runner.sampling.sampler import SamplingRow, sample

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/models",
    "engine/headrace_engine/runner/sampling",
    "engine/headrace_engine/runner/attention",
    "engine/headrace_engine/runner/linear",
    "engine/headrace_engine/runner/batch.py",
)

BLOCK_SIZE = 16
NUM_BLOCKS = 64
# An undisturbed run more or less is what an example costs.
SEARCH = settings(
    max_examples=int(os.environ.get("HEADRACE_FUZZ_EXAMPLES", "6")),
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.explain],
)


# -- logits, to the last bit


class Laboratory:
    """A batch-invariant model whose steps the test puts together itself."""

    def __init__(self, folder: str, dtype: str, *, batch_invariant: bool = True) -> None:
        args = EngineArgs(model=folder, dtype=dtype, block_size=BLOCK_SIZE, batch_invariant=batch_invariant)
        config = args.create_engine_config()
        self._model = PagedModel(config.model, config.cache)
        self._processors = ProcessorSet(config)
        self._model.allocate(NUM_BLOCKS)

    @torch.inference_mode()
    def logits(self, sequences: dict[str, list[int]], steps: list[dict[str, int]], blocks: list[int]) -> dict[str, Any]:
        """Logits of every token: [tokens, vocabulary] a sequence.

        `steps` say how many tokens of which sequence are computed together; `blocks` are handed out in this order.
        """
        batch = RequestBatch(len(sequences), NUM_BLOCKS, BLOCK_SIZE, self._processors)
        free = iter(blocks)
        for name, tokens in sequences.items():
            batch._add(
                NewRequest(
                    request_id=name,
                    token_ids=tokens,
                    num_prompt_tokens=len(tokens),
                    sampling_params=SamplingParams(),
                    seed=0,
                    suppressed_token_ids=[],
                    block_ids=[next(free) for _ in range(-(-len(tokens) // BLOCK_SIZE))],
                    num_computed_tokens=0,
                )
            )
        found: dict[str, list[torch.Tensor]] = {name: [] for name in sequences}
        done = dict.fromkeys(sequences, 0)
        for step in steps:
            spans = []
            for name, count in step.items():
                tokens = sequences[name][done[name] : done[name] + count]
                spans.append(TokenSpan(batch.requests[name], done[name], tokens, count))
                done[name] += count
            rows = self._model.forward(batch.pack(spans, [], {}))
            for name, part in zip(step, rows.split(list(step.values())), strict=True):
                found[name].append(part.clone())
        assert done == {name: len(tokens) for name, tokens in sequences.items()}
        return {name: torch.cat(parts) for name, parts in found.items()}

    def alone(self, tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.logits({"a": tokens}, [{"a": len(tokens)}], list(range(1, NUM_BLOCKS)))["a"]
        return logits


@st.composite
def schedules(draw: st.DrawFn, sequences: dict[str, list[int]]) -> list[dict[str, int]]:
    """Chunks of all sequences, mixed anyhow."""
    left = {name: len(tokens) for name, tokens in sequences.items()}
    steps = []
    while left:
        chosen = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        step = {name: draw(st.one_of(st.just(1), st.just(left[name]), st.integers(1, left[name]))) for name in chosen}
        steps.append(step)
        left = {name: count - step.get(name, 0) for name, count in left.items() if count > step.get(name, 0)}
    return steps


def random_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_bits_do_not_depend_on_company(lab: Laboratory, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.sampled_from([1, 2, 17, 40, 63, 64, 65, 90]), min_size=1, max_size=4))
    sequences = {str(index): random_tokens(length, index) for index, length in enumerate(lengths)}
    steps = data.draw(schedules(sequences))
    blocks = data.draw(st.permutations(range(1, NUM_BLOCKS)))
    for name, found in lab.logits(sequences, steps, blocks).items():
        assert torch.equal(found, lab.alone(sequences[name]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_logits_are_a_function_of_the_sequence_alone(
    tiny_model: Callable[[str], TinyModel], name: str, dtype: str
) -> None:
    lab = Laboratory(tiny_model(name).folder, dtype)

    @given(data=st.data())
    @SEARCH
    def search(data: st.DataObject) -> None:
        assert_bits_do_not_depend_on_company(lab, data)

    search()


def test_a_draw_does_not_depend_on_the_rows_beside_it() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 5000, generator=generator) * 3
    rows = [
        SamplingRow(
            params=SamplingParams(
                temperature=(0.0, 0.5, 1.0, 2.0)[i % 4],
                top_k=(0, 3, 50)[i % 3],
                top_p=(1.0, 0.9, 0.3)[i % 3],
                logprobs=2,
            ),
            u=i / 40,
            prompt_token_ids=(),
            output_token_ids=(),
            suppressed_token_ids=(),
        )
        for i in range(40)
    ]
    together = sample(logits, rows)
    for index, row in enumerate(rows):
        tokens, logprobs = sample(logits[index : index + 1], [row])
        assert tokens == [together[0][index]]
        assert logprobs[0] == together[1][index]


def test_the_plain_torch_attention_is_refused(llama: TinyModel) -> None:
    with pytest.raises(ConfigError, match="attention_backend must be auto or native with batch_invariant, got torch"):
        EngineArgs(model=llama.folder, batch_invariant=True, attention_backend="torch").create_engine_config()
    # 24 tokens are no multiple of the kernel's vectors, so `auto` would fall back to plain torch
    config = EngineArgs(model=llama.folder, batch_invariant=True, block_size=24).create_engine_config()
    with pytest.raises(ConfigError, match="batch_invariant needs the compiled attention kernel"):
        create_runner(config).load_model()


# -- tokens, through the whole core


@dataclass
class Outcome:
    tokens: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]]


class Bench:
    """Runs requests under any conditions, and each of them alone once."""

    def __init__(self, model: TinyModel, **options: Any) -> None:
        self._model = model
        self._options = {"block_size": BLOCK_SIZE, "max_model_len": 112, **options}
        self._alone: dict[int, Outcome] = {}

    def request(self, kind: int, *, emitted: list[int] | None = None, name: str | None = None) -> EngineCoreRequest:
        params = SamplingParams(
            temperature=(0.6, 1.0, 1.5, 0.0)[kind % 4],
            top_p=(1.0, 0.9)[kind % 2],
            repetition_penalty=(1.0, 1.2)[kind % 2],
            max_tokens=30,
            ignore_eos=True,
            logprobs=2,
        )
        prompt = [9, 4, 11] * 11 + random_tokens(1 + 7 * (kind % 3), kind)
        return EngineCoreRequest(
            request_id=name or str(kind),
            prompt_token_ids=prompt,
            sampling_params=params,
            seed=kind,
            output_token_ids=emitted or [],
        )

    def run(self, requests: list[EngineCoreRequest], gaps: list[int], **options: Any) -> Outcome:
        config = EngineArgs(model=self._model.folder, **{**self._options, **options}).create_engine_config()
        core = EngineCore(config, create_runner(config))
        outcome = Outcome({}, {})

        def step() -> None:
            for news in core.step().outputs:
                outcome.tokens.setdefault(news.request_id, []).extend(news.new_token_ids)
                outcome.logprobs.setdefault(news.request_id, []).extend(news.logprobs or [])
            core.check_integrity()

        for request, gap in zip(requests, gaps, strict=True):
            core.add_request(request)
            for _ in range(gap):
                if core.has_work():
                    step()
        while core.has_work():
            step()
        return outcome

    def alone(self, kind: int) -> Outcome:
        if kind not in self._alone:
            self._alone[kind] = self.run([self.request(kind, name="0")], [0], num_blocks=80)
        return self._alone[kind]

    def check(self, data: st.DataObject, *, bits: bool) -> None:
        kinds = data.draw(st.lists(st.integers(0, 7), min_size=2, max_size=6, unique=True))
        # A worker died after so many tokens; this one continues.
        died_at = {kind: data.draw(st.sampled_from([0, 0, 1, 8, 29])) for kind in kinds}
        found = self.run(
            [self.request(kind, emitted=self.alone(kind).tokens["0"][: died_at[kind]]) for kind in kinds],
            [data.draw(st.integers(0, 6)) for _ in kinds],
            num_blocks=data.draw(st.sampled_from([8, 11, 80])),
            max_num_batched_tokens=data.draw(st.sampled_from([5, 37, 2048])),
            max_num_seqs=data.draw(st.sampled_from([1, 3, 8])),
            enable_prefix_caching=data.draw(st.booleans()),
            speculative_config=data.draw(st.sampled_from([None, self._ngram, self._draft])),
        )
        for kind in kinds:
            expected = self.alone(kind)
            assert found.tokens[str(kind)] == expected.tokens["0"][died_at[kind] :]
            if bits:
                assert found.logprobs[str(kind)] == expected.logprobs["0"][died_at[kind] :]

    @property
    def _ngram(self) -> dict[str, Any]:
        return {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}

    @property
    def _draft(self) -> dict[str, Any]:
        return {"method": "draft_model", "num_speculative_tokens": 3, "model": self._model.folder}


def test_a_seed_gives_the_same_tokens_whatever_happens_around_it(llama: TinyModel) -> None:
    """Float32 without the mode: equal tokens, though not always equal bits."""
    bench = Bench(llama, dtype="float32")

    @given(data=st.data())
    @SEARCH
    def search(data: st.DataObject) -> None:
        bench.check(data, bits=False)

    search()


def test_batch_invariant_bfloat16_gives_the_same_bits_whatever_happens_around_it(llama: TinyModel) -> None:
    bench = Bench(llama, dtype="bfloat16", batch_invariant=True)

    @given(data=st.data())
    @SEARCH
    def search(data: st.DataObject) -> None:
        bench.check(data, bits=True)

    search()
