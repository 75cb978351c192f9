"""Outputs that are held back: the caller gets the same output in the end, whenever it is published."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.api.input_processor import InputProcessor, ProcessedRequest
from headrace_engine.api.output_processor import OutputProcessor
from headrace_engine.core.outputs import EngineCoreOutput
from headrace_engine.requests.outputs import RequestOutput
from headrace_engine.requests.request import FinishReason
from headrace_engine.requests.sampling_params import RequestOutputKind, SamplingParams
from unit.workers.fakes import MODEL, FakeTokenizer

LETTER_A = 10


def admit(processor: OutputProcessor, **params: object) -> ProcessedRequest:
    request = InputProcessor(MODEL, FakeTokenizer()).process("r", "abc", SamplingParams(max_tokens=30, **params))  # type: ignore[arg-type]
    processor.add_request(request)
    return request


def news(request: ProcessedRequest, choice: int, *token_ids: int, end: bool = False) -> EngineCoreOutput:
    logprobs = [[(token_id, -float(token_id), 1)] for token_id in token_ids]
    finish_reason = FinishReason.LENGTH if end else None
    return EngineCoreOutput(
        request.choices[choice].request_id, list(token_ids), finish_reason=finish_reason, logprobs=logprobs
    )


@given(
    n=st.integers(1, 3),
    stream_interval=st.none() | st.integers(1, 4),
    steps=st.lists(st.tuples(st.sets(st.integers(0, 2)), st.booleans()), max_size=25),
)
def test_deltas_join_to_the_whole_output(
    n: int, stream_interval: int | None, steps: list[tuple[set[int], bool]]
) -> None:
    """Each step has outputs of some choices. At the end all choices end in a step that holds back."""
    processor = OutputProcessor(FakeTokenizer())  # type: ignore[arg-type]
    request = admit(processor, n=n, logprobs=0, stream_interval=stream_interval, output_kind=RequestOutputKind.DELTA)
    generated: list[list[int]] = [[] for _ in range(n)]
    shown: list[list[int]] = [[] for _ in range(n)]
    texts, logprobs = [""] * n, [0] * n

    def show(outputs: list[EngineCoreOutput], hold_back: bool) -> None:
        for result in processor.process(outputs, hold_back=hold_back).request_outputs:
            for completion in result.outputs:
                assert completion.token_ids
                shown[completion.index] += completion.token_ids
                texts[completion.index] += completion.text
                logprobs[completion.index] += len(completion.logprobs or [])

    for number, (choices, hold_back) in enumerate(steps):
        step = []
        for choice in sorted(choices & set(range(n))):
            generated[choice].append(LETTER_A + number)
            step.append(news(request, choice, LETTER_A + number))
        show(step, hold_back)
        for index in range(n):
            assert shown[index] == generated[index][: len(shown[index])]
            assert bool(shown[index]) == bool(generated[index])  # the first token never waits
            if not hold_back:
                assert len(generated[index]) - len(shown[index]) < (stream_interval or 1)
        assert hold_back or not processor.holds_back
    for index in range(n):
        generated[index].append(LETTER_A)
        show([news(request, index, LETTER_A, end=True)], hold_back=True)
        assert shown[index] == generated[index]  # nor does the last
    assert texts == [FakeTokenizer().backend.decode(token_ids) for token_ids in generated]
    assert logprobs == [len(token_ids) for token_ids in generated]
    assert not processor.holds_back
    assert len(processor) == 0


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_cumulative_and_final_outputs_stay_whole(kind: RequestOutputKind) -> None:
    processor = OutputProcessor(FakeTokenizer())  # type: ignore[arg-type]
    request = admit(processor, n=2, output_kind=kind)
    results: list[RequestOutput] = []
    for hold_back in (True, True, False, True):
        step = [news(request, choice, LETTER_A) for choice in range(2)]
        results += processor.process(step, hold_back=hold_back).request_outputs
    for choice in range(2):
        results += processor.process([news(request, choice, LETTER_A, end=True)], hold_back=True).request_outputs
    seen = [[(completion.index, len(completion.token_ids)) for completion in result.outputs] for result in results]
    whole = [[(0, 1), (1, 1)], [(0, 3), (1, 3)], [(0, 5)], [(1, 5)]]
    assert seen == (whole if kind is RequestOutputKind.CUMULATIVE else [[(0, 5), (1, 5)]])


def test_an_abort_returns_held_back_output_and_forgets_it() -> None:
    processor = OutputProcessor(FakeTokenizer())  # type: ignore[arg-type]
    request = admit(processor, output_kind=RequestOutputKind.DELTA)
    for _ in range(3):
        processor.process([news(request, 0, LETTER_A)], hold_back=True)
    aborted = processor.abort("r")
    assert aborted is not None
    assert len(aborted[0].outputs[0].token_ids) == 2
    assert not processor.holds_back
    assert processor.process([]).request_outputs == []
