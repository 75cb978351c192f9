"""A reader gets nothing twice and misses nothing, whatever the server loses and however chunks are divided."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from headrace_broker.results import TokenLogprob
from headrace_broker.streams.events import ChunkEvent, RowsEvent, StreamEvent
from headrace_broker.streams.seen_output import SeenOutput

TEXTS = ["a", "bc", "", "é", "def "]


def text_of(token: int) -> str:
    return TEXTS[token % len(TEXTS)]


def chunk(
    attempt: int,
    offset: int,
    token_ids: Sequence[int],
    index: int = 0,
    *,
    tokens: int | None = None,
    last: bool = False,
) -> ChunkEvent:
    """A chunk of an attempt, whose tokens are also its log-probabilities. `tokens`: with several choices."""
    return ChunkEvent(
        f"{attempt}-{offset}",
        attempt,
        offset,
        index,
        list(token_ids),
        "".join(map(text_of, token_ids)),
        logprobs=[[TokenLogprob(token, 0.0, 1, "")] for token in token_ids],
        finish_reason="stop" if last else None,
        choice_tokens=tokens,
    )


def new(events: Sequence[StreamEvent]) -> list[StreamEvent]:
    """What a reader gets of these events."""
    seen = SeenOutput()
    return [event for event in map(seen.new, events) if event is not None]


def ids(events: Sequence[StreamEvent]) -> list[str]:
    return [event.entry_id for event in new(events)]


def cut(event: StreamEvent) -> tuple[str, list[int], str]:
    assert isinstance(event, ChunkEvent)
    return event.entry_id, event.token_ids, event.text


@dataclass
class Output:
    """One choice as its chunks add up."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finishes: int = 0

    def add(self, event: ChunkEvent) -> None:
        self.token_ids += event.token_ids
        self.text += event.text
        self.finishes += event.finish_reason is not None
        assert event.logprobs is not None and len(event.logprobs) == len(event.token_ids)


def attempt_of(data: st.DataObject, number: int, choices: list[list[int]], begun: list[int]) -> Iterator[ChunkEvent]:
    """Draw the chunks of an attempt that begins each choice after `begun` tokens."""
    left = [*begun]
    while todo := [index for index, tokens in enumerate(choices) if left[index] < len(tokens)]:
        index = data.draw(st.sampled_from(todo))
        end = min(len(choices[index]), left[index] + data.draw(st.integers(1, 4)))
        token_ids = choices[index][left[index] : end]
        left[index] = end
        tokens = end if len(choices) > 1 else None
        yield chunk(number, sum(left), token_ids, index, tokens=tokens, last=end == len(choices[index]))


@given(st.data())
def test_each_token_and_its_text_come_once_whatever_is_lost(data: st.DataObject) -> None:
    choices = data.draw(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), min_size=1, max_size=3))
    seen, outputs = SeenOutput(), [Output() for _ in choices]
    kept: list[ChunkEvent] = []
    for number in (1, 2, 3):
        begun = [sum(len(each.token_ids) for each in kept if each.index == index) for index in range(len(choices))]
        written = list(attempt_of(data, number, choices, begun))
        num_read = len(written) if number == 3 else data.draw(st.integers(0, len(written)))
        for event in written[:num_read]:
            if (found := seen.new(event)) is not None:
                assert isinstance(found, ChunkEvent)
                outputs[found.index].add(found)
        everything = kept + written[:num_read]
        kept = everything[: data.draw(st.integers(0, len(everything)))]
    for tokens, output in zip(choices, outputs, strict=True):
        assert output == Output(tokens, "".join(map(text_of, tokens)), 1)


def test_a_reader_that_continues_after_an_entry_misses_nothing_and_gets_no_token_of_its_own_twice() -> None:
    first = [chunk(1, 7, [6, 7]), chunk(1, 8, [8])]
    again = [chunk(2, 4, [3, 4]), chunk(2, 6, [5, 6]), chunk(2, 8, [7, 8]), chunk(2, 10, [9, 10]), chunk(2, 11, [11])]
    assert ids([*first, *again]) == ["1-7", "1-8", "2-4", "2-6", "2-10", "2-11"]
    found = new([chunk(1, 7, [6, 7]), chunk(2, 6, [5, 6]), chunk(2, 8, [7, 8]), chunk(2, 9, [9])])
    assert [cut(event)[1] for event in found] == [[6, 7], [5, 6], [7, 8], [9]], "where token 7 begins is not known"


def test_a_reader_that_missed_lost_entries_begins_again_behind_them() -> None:
    found = new([chunk(1, 1, [1]), chunk(2, 4, [3, 4]), chunk(3, 5, [4, 5]), chunk(4, 6, [4, 5, 6])])
    assert [event.entry_id for event in found] == ["1-1", "2-4", "3-5", "4-6"]


def test_a_chunk_that_is_cut_has_the_new_tokens_with_their_text_and_logprobs() -> None:
    flushed = chunk(1, 2, [])
    flushed.text = "!"  # text that waited for the next token
    again = chunk(2, 3, [1, 2, 3])
    again.text, again.prompt_logprobs = "bcx!yz", [None]
    found = new([chunk(1, 1, [1]), chunk(1, 2, [5]), flushed, again])
    assert cut(found[-1]) == ("2-3", [3], "yz")
    assert isinstance(found[-1], ChunkEvent)
    assert found[-1].logprobs == [[TokenLogprob(3, 0.0, 1, "")]]
    assert found[-1].prompt_logprobs is None


def test_after_a_chunk_that_could_not_be_cut_no_text_is_lost() -> None:
    found = new([chunk(1, 7, [5, 6]), chunk(2, 9, [6, 8, 9]), chunk(3, 10, [8, 9, 10]), chunk(3, 12, [11, 12])])
    assert [cut(event)[1] for event in found] == [[5, 6], [6, 8, 9], [8, 9, 10], [11, 12]]
    assert cut(found[2])[2].endswith(text_of(10))


def test_rows_that_came_before_are_left_out() -> None:
    rows = [
        RowsEvent("1-3", 1, 0, 3, b"aabbcc"),
        RowsEvent("2-2", 2, 0, 2, b"aabb"),
        RowsEvent("2-5", 2, 2, 3, b"ccddee"),
    ]
    assert new(rows) == [rows[0], RowsEvent("2-5", 2, 3, 2, b"ddee")]


def test_of_an_older_worker_no_chunk_of_several_choices_is_left_out_unless_the_choice_has_finished() -> None:
    first = [chunk(1, 1, [1]), chunk(1, 2, [1], 1), chunk(1, 3, [2]), chunk(1, 4, [2], 1, last=True)]
    again = [chunk(2, 4, [2]), chunk(2, 4, [2], 1, last=True)]
    assert ids([*first, *again]) == ["1-1", "1-2", "1-3", "1-4", "2-4"]


def test_the_count_of_an_older_worker_leaves_out_nothing_of_its_successor() -> None:
    first = [chunk(1, 1, [1]), chunk(1, 2, [1], 1), chunk(1, 3, [2]), chunk(1, 4, [2], 1)]
    again = [chunk(2, 5, [3], tokens=3), chunk(2, 6, [3], 1, tokens=3)]
    assert ids([*first, *again])[-2:] == ["2-5", "2-6"]
    assert ids([chunk(1, 1, [1]), *again])[-2:] == ["2-5", "2-6"]


def test_a_last_chunk_comes_once_even_if_its_tokens_came_before() -> None:
    last = chunk(2, 2, [2], last=True)
    found = new([chunk(1, 2, [1, 2]), last, last])
    assert [event.entry_id for event in found] == ["1-2", "2-2"]
