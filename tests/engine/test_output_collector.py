"""A slow reader gets fewer and larger outputs, in order, with nothing lost."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.test_async_llm import make
from engine.tiny_models import TinyModel
from headrace_engine import RequestOutput, SamplingParams
from headrace_engine.api.output_collector import OutputCollector
from headrace_engine.errors import EngineDeadError
from headrace_engine.requests.outputs import CompletionOutput, Logprob
from headrace_engine.requests.sampling_params import RequestOutputKind

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


def output(*completions: CompletionOutput, finished: bool = False, **more: object) -> RequestOutput:
    return RequestOutput("r", "a", [1], outputs=list(completions), finished=finished, **more)  # type: ignore[arg-type]


def logprobs(token_id: int) -> list[dict[int, Logprob]]:
    return [{token_id: Logprob(logprob=-1.0, rank=1, decoded_token="x")}]


@given(indexes=st.lists(st.integers(0, 2), min_size=1, max_size=30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_deltas_taken_at_any_times_add_up_for_each_choice(indexes: list[int], data: st.DataObject) -> None:
    async def run() -> None:
        collector = OutputCollector(DELTA)
        texts, ids, found = [""] * 3, [list[int]() for _ in range(3)], [list[dict[int, Logprob]]() for _ in range(3)]
        for number, index in enumerate(indexes):
            last = number == len(indexes) - 1
            reason = "stop" if last else None
            delta = CompletionOutput(index, chr(97 + number % 26), [number], -1.0 * number, logprobs(number), reason)
            collector.put(output(delta, finished=last, num_cached_tokens=number))
            if last or data.draw(st.booleans()):
                taken = await collector.get()
                assert (taken.finished, taken.num_cached_tokens) == (last, number)
                for completion in taken.outputs:
                    texts[completion.index] += completion.text
                    ids[completion.index] += completion.token_ids
                    found[completion.index] += completion.logprobs or []
                    assert completion.cumulative_logprob == -1.0 * completion.token_ids[-1]
        expected = [[number for number, index in enumerate(indexes) if index == choice] for choice in range(3)]
        assert ids == expected
        assert texts == ["".join(chr(97 + number % 26) for number in numbers) for numbers in expected]
        assert [[next(iter(entry)) for entry in entries] for entries in found] == expected

    asyncio.run(run())


async def test_of_cumulative_outputs_the_last_of_each_choice_is_kept() -> None:
    collector = OutputCollector(CUMULATIVE)
    collector.put(output(CompletionOutput(0, "a", [1]), prompt_logprobs=[None]))
    collector.put(output(CompletionOutput(1, "x", [7], finish_reason="stop", stop_reason=7)))
    collector.put(output(CompletionOutput(0, "ab", [1, 2]), prompt_logprobs=[None]))
    collector.put(output(CompletionOutput(0, "abc", [1, 2, 3], finish_reason="length"), finished=True))
    taken = await collector.get()
    assert [(one.index, one.text, one.finish_reason) for one in taken.outputs] == [
        (0, "abc", "length"),
        (1, "x", "stop"),
    ]
    assert (taken.finished, taken.prompt_logprobs) == (True, [None])


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
async def test_prompt_logprobs_of_a_first_delta_are_kept(kind: RequestOutputKind) -> None:
    collector = OutputCollector(kind)
    collector.put(output(CompletionOutput(0, "a", [1]), prompt_logprobs=[None, logprobs(5)[0]]))
    collector.put(output(CompletionOutput(0, "b", [2])))
    assert (await collector.get()).prompt_logprobs == [None, logprobs(5)[0]]


async def test_an_error_comes_behind_what_is_pending_and_again() -> None:
    collector = OutputCollector(DELTA)
    collector.put(output(CompletionOutput(0, "a", [1])))
    collector.fail(EngineDeadError("gone"))
    assert (await collector.get()).outputs[0].text == "a"
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            await collector.get()


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
async def test_a_reader_that_stays_away_finds_one_output_with_all_tokens(
    llama: TinyModel, kind: RequestOutputKind
) -> None:
    engine = make(llama, core_in_process=True)
    params = SamplingParams(n=2, max_tokens=200, seed=7, ignore_eos=True, logprobs=0, output_kind=kind)
    try:
        slow = engine.generate("mill", params, "slow")
        outputs = [await anext(slow)]
        steady = [one async for one in engine.generate("mill", params, "steady")]  # begins and ends behind the slow one
        assert engine._streams["slow"]._pending is not None
        outputs += [one async for one in slow]
    finally:
        await engine.shutdown()
    assert len(steady) > 150
    assert len(outputs) == 2
    assert joined(outputs, kind) == joined(steady, kind)


def joined(outputs: list[RequestOutput], kind: RequestOutputKind) -> dict[int, tuple[str, list[int], int]]:
    choices: dict[int, tuple[str, list[int], int]] = {}
    for one in outputs:
        for choice in one.outputs:
            new = (choice.text, choice.token_ids, len(choice.logprobs or []))
            old = choices.get(choice.index, ("", [], 0)) if kind is DELTA else ("", [], 0)
            choices[choice.index] = (old[0] + new[0], old[1] + new[1], old[2] + new[2])
    return choices


async def test_thousands_of_untaken_outputs_hold_no_more_than_one_output() -> None:
    collector = OutputCollector(DELTA)
    for number in range(5000):
        collector.put(output(CompletionOutput(0, "abcd", [number], logprobs=logprobs(number))))
    assert isinstance(collector._pending, RequestOutput)
    taken = await collector.get()
    assert (taken.outputs[0].text, taken.outputs[0].token_ids) == ("abcd" * 5000, list(range(5000)))

    collector = OutputCollector(CUMULATIVE)
    tracemalloc.start()
    for number in range(2000):
        collector.put(output(CompletionOutput(0, "x" * number, list(range(number)))))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000
    assert len((await collector.get()).outputs[0].token_ids) == 1999
