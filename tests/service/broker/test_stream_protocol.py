"""Writes, zombies, lost replies and cancellations in any order leave one consistent stream."""

import uuid

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_broker.keys import stream_key
from headrace_broker.results import ErrorInfo
from headrace_broker.streams.events import ChunkEvent, EndEvent, StreamEvent, read_entry
from headrace_broker.streams.writer import StreamWrite, StreamWriter, WriteOutcome

WORKERS = 3
ACTIONS = st.lists(
    st.tuples(
        st.integers(0, WORKERS - 1),
        st.sampled_from(["claim", "write", "write", "write", "replay", "lose reply", "finish", "cancel"]),
        st.integers(1, 3),
    ),
    max_size=40,
)


class Worker:
    """Generates the tokens 1, 2, 3, ... and assumes that it owns the request until a write is refused."""

    def __init__(self, writer: StreamWriter, request_id: str) -> None:
        self.writer = writer
        self.request_id = request_id
        self.attempt = 0
        self.tokens = 0
        self.unconfirmed: list[StreamWrite] = []
        self.confirmed: list[StreamWrite] = []
        self.told: WriteOutcome | None = None

    @property
    def active(self) -> bool:
        return self.attempt > 0 and self.told is None

    def claim(self) -> None:
        claim = self.writer.claim(self.request_id, "w")
        self.unconfirmed, self.confirmed = [], []
        self.attempt = 0 if claim.ended else claim.attempt
        self.tokens = sum(len(entry.token_ids) for entry in claim.entries if isinstance(entry, ChunkEvent))
        self.told = None

    def generate(self, count: int, *, finish: bool = False) -> None:
        ids = list(range(self.tokens + 1, self.tokens + count + 1))
        self.tokens += count
        write = StreamWrite.chunk(self.request_id, self.attempt, self.tokens, index=0, token_ids=ids, text="")
        self.unconfirmed.append(write)
        if finish:
            self.unconfirmed.append(StreamWrite.end(self.request_id, self.attempt, self.tokens, finish_reason="stop"))

    def publish(self, *, reply_arrives: bool = True) -> None:
        outcome = self.writer.publish(self.unconfirmed).get((self.request_id, self.attempt))
        if reply_arrives:
            self.confirmed += self.unconfirmed
            self.unconfirmed = []
            self.told = outcome


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(actions=ACTIONS)
def test_every_token_appears_once_and_in_order(
    redis_client: "redis.Redis", actions: list[tuple[int, str, int]]
) -> None:
    request_id = uuid.uuid4().hex
    writer = StreamWriter(redis_client, 60)
    workers = [Worker(writer, request_id) for _ in range(WORKERS)]
    finished: set[int] = set()
    newest_attempt = 0
    for number, action, count in actions:
        worker = workers[number]
        if action == "claim":
            worker.claim()
            newest_attempt = max(newest_attempt, worker.attempt)
            finished.discard(number)
        elif action == "cancel":
            writer.end_unclaimed(request_id, "cancelled", ErrorInfo("cancelled", "x"))
        elif not worker.active or number in finished:
            continue
        elif action == "replay":
            assert set(worker.writer.publish(worker.confirmed).values()) <= set(WriteOutcome)
        else:
            worker.generate(count, finish=action == "finish")
            worker.publish(reply_arrives=action != "lose reply")
            if action == "finish":
                finished.add(number)
            if worker.told is None and action != "lose reply":
                assert worker.attempt == newest_attempt  # no other attempt's write is accepted
    check_stream(redis_client, request_id)


def check_stream(client: "redis.Redis", request_id: str) -> None:
    events: list[StreamEvent] = [read_entry(*entry) for entry in client.xrange(stream_key(request_id))]
    tokens = [token for event in events if isinstance(event, ChunkEvent) for token in event.token_ids]
    assert tokens == list(range(1, len(tokens) + 1))
    ends = [position for position, event in enumerate(events) if isinstance(event, EndEvent)]
    assert ends in ([], [len(events) - 1])
    if ends:
        last = events[-1]
        assert isinstance(last, EndEvent)
        assert last.tokens == len(tokens)
    seen = 0
    for event in events:
        if isinstance(event, ChunkEvent):
            seen += len(event.token_ids)
            assert event.offset == seen
