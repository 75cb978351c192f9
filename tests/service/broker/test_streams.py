"""The stream protocol against a real server: one test for each conflict between two writers."""

import pytest
import redis

from headrace_broker.client.submission import cancel_call
from headrace_broker.errors import ResultTimeoutError, StreamExpiredError
from headrace_broker.keys import ENDED_SECONDS, ended_key, stream_key
from headrace_broker.results import ErrorInfo, Usage
from headrace_broker.streams.events import ChunkEvent, EndEvent, StartEvent
from headrace_broker.streams.subscriber import read_stream, read_streams
from headrace_broker.streams.writer import END_STREAM, Ending, StreamWrite, StreamWriter, WriteOutcome, draws_of

TTL = 60


@pytest.fixture
def writer(redis_client: "redis.Redis") -> StreamWriter:
    return StreamWriter(redis_client, TTL)


def chunk(attempt: int, offset: int, request_id: str = "r", *, tokens: int = 1) -> StreamWrite:
    token_ids = list(range(offset - tokens + 1, offset + 1))
    return StreamWrite.chunk(request_id, attempt, offset, index=0, token_ids=token_ids, text=f"<{offset}>")


def end(attempt: int, tokens: int, request_id: str = "r") -> StreamWrite:
    return StreamWrite.end(request_id, attempt, tokens, finish_reason="stop", usage=Usage(1, 0, tokens))


def cancel(client: "redis.Redis", request_id: str = "r") -> bytes | None:
    script = client.register_script(END_STREAM.text)
    reply: bytes | None = script(**cancel_call(request_id, TTL))
    return reply


def entry_ids(client: "redis.Redis", request_id: str = "r") -> list[str]:
    return [entry_id.decode() for entry_id, _ in client.xrange(stream_key(request_id))]


def test_a_request_runs_from_claim_to_end(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    claim = writer.claim("r", "worker-1")
    assert (claim.attempt, claim.entries, claim.ended) == (1, [], None)
    assert writer.publish([chunk(1, 1)]) == {}
    assert writer.publish([chunk(1, 3, tokens=2), end(1, 3)]) == {}
    events = list(read_stream(redis_client, "r", timeout=5))
    assert [event.entry_id for event in events] == ["1-0", "1-1", "1-3", "1-4"]
    assert events[0] == StartEvent("1-0", 1, "worker-1")
    assert events[-1] == EndEvent("1-4", 1, 3, "stop", Usage(1, 0, 3), None)


def test_a_start_entry_has_the_prompt_length_and_its_tail(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    writer.claim("r", "w", prompt_tokens=7, prompt_tail="<think>\n")
    writer.claim("r", "w2", prompt_tokens=0, prompt_tail="")
    writer.claim("r", "an older one")
    writer.publish([end(3, 0)])
    starts = [event for event in read_stream(redis_client, "r", timeout=5) if isinstance(event, StartEvent)]
    assert [(start.prompt_tokens, start.prompt_tail) for start in starts] == [(7, "<think>\n"), (0, ""), (None, None)]
    assert "think" not in repr(starts)


def test_a_start_entry_names_the_draws_or_has_an_empty_name(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    writer.claim("r", "an older one")
    writer.publish([chunk(1, 1)])
    writer.claim("r", "w", draws="headrace-1")
    writer.publish([chunk(2, 2)])
    writer.claim("r", "w", draws="a name without a token behind it")
    writer.claim("r", "w", draws="")
    writer.publish([chunk(4, 3)])
    entries = writer.claim("r", "w").entries
    starts = [event for event in entries if isinstance(event, StartEvent)]
    assert [start.draws for start in starts] == [None, "headrace-1", "a name without a token behind it", ""]
    assert draws_of(entries) == {"headrace-1", ""}


def test_a_replay_after_a_lost_reply_changes_nothing_and_does_not_fail(
    writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    writer.claim("r", "w")
    writes = [chunk(1, 1), chunk(1, 2), end(1, 2)]
    assert writer.publish(writes) == {}
    before = redis_client.xrange(stream_key("r"))
    assert writer.publish(writes) == {}
    assert writer.publish(writes[:1]) == {}
    assert redis_client.xrange(stream_key("r")) == before


@pytest.mark.parametrize("zombie_offset", [2, 3, 4, 9])
def test_a_zombie_is_fenced_whether_it_is_behind_level_or_ahead(
    writer: StreamWriter, redis_client: "redis.Redis", zombie_offset: int
) -> None:
    writer.claim("r", "zombie")
    writer.publish([chunk(1, 1)])
    claim = writer.claim("r", "successor")
    assert claim.attempt == 2
    assert [type(entry) for entry in claim.entries] == [StartEvent, ChunkEvent]
    writer.publish([chunk(2, 2), chunk(2, 3)])
    assert writer.publish([chunk(1, zombie_offset)]) == {("r", 1): WriteOutcome.FENCED}
    assert entry_ids(redis_client) == ["1-0", "1-1", "2-0", "2-2", "2-3"]


def test_a_zombie_cannot_end_the_stream(writer: StreamWriter) -> None:
    writer.claim("r", "zombie")
    writer.claim("r", "successor")
    assert writer.publish([end(1, 5)]) == {("r", 1): WriteOutcome.FENCED}
    assert writer.publish([chunk(2, 1)]) == {}


def test_a_zombie_is_fenced_not_cancelled_after_another_worker_ends_the_stream(writer: StreamWriter) -> None:
    writer.claim("r", "zombie")
    writer.claim("r", "successor")
    writer.publish([chunk(2, 1), end(2, 1)])
    assert writer.publish([chunk(1, 1)]) == {("r", 1): WriteOutcome.FENCED}


def test_an_ended_stream_is_reported_and_not_fenced(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    writer.claim("r", "w")
    writer.publish([chunk(1, 1), end(1, 1)])
    before = redis_client.xrange(stream_key("r"))
    claim = writer.claim("r", "another")
    assert claim.ended == EndEvent("1-2", 1, 1, "stop", Usage(1, 0, 1), None)
    assert claim.attempt == 1
    assert [entry.entry_id for entry in claim.entries] == ["1-0", "1-1", "1-2"]
    assert redis_client.xrange(stream_key("r")) == before


def test_a_request_cancelled_in_the_queue_never_runs(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    assert cancel(redis_client) is None
    claim = writer.claim("r", "w")
    assert claim.ended is not None
    assert (claim.ended.entry_id, claim.ended.finish_reason) == ("1-1", "cancelled")
    assert claim.ended.error == ErrorInfo("cancelled", "the client cancelled the request")
    # the message may still wait in the queue
    assert redis_client.ttl(stream_key("r")) > TTL


def test_a_running_request_is_cancelled_at_its_next_write(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    writer.claim("r", "w")
    writer.publish([chunk(1, 5, tokens=5)])
    assert cancel(redis_client) is None
    assert writer.publish([chunk(1, 6)]) == {("r", 1): WriteOutcome.CANCELLED}
    assert entry_ids(redis_client) == ["1-0", "1-5", "2-6"]
    assert cancel(redis_client) == cancel_call("r", TTL)["args"][0]  # a second call changes nothing
    assert entry_ids(redis_client) == ["1-0", "1-5", "2-6"]


def test_an_end_without_a_claim_counts_the_tokens_of_all_attempts(
    writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    writer.claim("r", "a")
    writer.publish([chunk(1, 7, tokens=7)])
    writer.claim("r", "b")
    writer.claim("r", "c")
    cancel(redis_client)
    assert entry_ids(redis_client)[-1] == "4-8"
    (ended,) = (event for event in read_stream(redis_client, "r") if isinstance(event, EndEvent))
    assert ended.tokens == 7


def test_ending_a_stream_that_was_never_claimed_happens_once(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    error = ErrorInfo("expired", "the deadline passed in the queue")
    assert writer.end_unclaimed("r", "expired", error) is Ending.WRITTEN
    assert writer.end_unclaimed("r", "rejected", None) is Ending.HAD_ENDED
    (event,) = read_stream(redis_client, "r")
    assert event == EndEvent("1-1", 1, 0, "expired", None, error)
    assert 0 < redis_client.ttl(stream_key("r")) <= TTL


@pytest.mark.parametrize(("lease", "attempt"), [(7, 7), (10**15, 10**9 - 1)])
def test_the_end_of_a_lost_stream_follows_the_entries_of_earlier_leases_and_stays(
    writer: StreamWriter, redis_client: "redis.Redis", lease: int, attempt: int
) -> None:
    assert writer.end_unclaimed("r", "error", ErrorInfo("stream_lost", "x"), "c", lease) is Ending.WRITTEN
    assert entry_ids(redis_client) == [f"{attempt}-1"]
    assert writer.claim("r", "w", content="c").ended is not None


def test_ending_an_unclaimed_stream_fences_its_writer(writer: StreamWriter) -> None:
    writer.claim("r", "w")
    assert writer.end_unclaimed("r", "error", ErrorInfo("dead_letter", "x")) is Ending.WRITTEN
    assert writer.publish([chunk(1, 1)]) == {("r", 1): WriteOutcome.FENCED}


def roll_back(client: "redis.Redis", *ids: str) -> None:
    """Delete these entries, as a failover to a replica that lacks them does."""
    entries = [(entry_id.decode(), fields) for entry_id, fields in client.xrange(stream_key("r"))]
    client.delete(stream_key("r"))
    for entry_id, fields in entries:
        if entry_id not in ids:
            client.xadd(stream_key("r"), fields, id=entry_id)


def test_nothing_is_written_after_entries_that_the_server_has_lost(
    writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    writer.claim("r", "w")
    writes = [chunk(1, 1), chunk(1, 2), chunk(1, 3)]
    writer.publish(writes)
    roll_back(redis_client, "1-2", "1-3")
    for late in (chunk(1, 4), end(1, 3), end(1, 4)):
        assert writer.publish([late]) == {("r", 1): WriteOutcome.ROLLED_BACK}
    assert entry_ids(redis_client) == ["1-0", "1-1"]
    assert writer.publish([*writes, chunk(1, 4), end(1, 4)]) == {}
    assert entry_ids(redis_client) == ["1-0", "1-1", "1-2", "1-3", "1-4", "1-5"]


def test_an_attempt_whose_claim_the_server_has_lost_writes_nothing(
    writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    writer.claim("r", "a")
    writer.publish([chunk(1, 1)])
    writer.claim("r", "b")
    roll_back(redis_client, "2-0")
    assert writer.publish([chunk(2, 2)]) == {("r", 2): WriteOutcome.ROLLED_BACK}
    assert entry_ids(redis_client) == ["1-0", "1-1"]


def test_two_workers_of_one_attempt_write_no_token_twice_and_leave_none_out(
    writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    writer.claim("r", "a")
    writer.publish([chunk(1, 1)])
    writer.claim("r", "b")
    roll_back(redis_client, "2-0")
    assert writer.claim("r", "c").attempt == 2
    ours = [chunk(2, 2), chunk(2, 4, tokens=2)]
    assert writer.publish(ours) == {}
    # chunks of other sizes and texts, and an end, written as if the other worker's did not exist
    for late in (chunk(2, 3, tokens=2), chunk(2, 5, tokens=4), end(2, 1), end(2, 3)):
        assert writer.publish([late]) == {("r", 2): WriteOutcome.ROLLED_BACK}
    other = StreamWrite.chunk("r", 2, 2, index=0, token_ids=[9], text="of another draw")
    behind = [chunk(2, 4, tokens=2), chunk(2, 5)]  # their token counts would fit
    assert writer.publish([other, *behind]) == {("r", 2): WriteOutcome.ROLLED_BACK}
    assert writer.publish([*ours, end(2, 4)]) == {}  # repeated after a lost reply, with the next write
    behind_the_end = [chunk(2, 6, tokens=2)]
    assert writer.publish(behind_the_end) == {("r", 2): WriteOutcome.ROLLED_BACK}
    assert entry_ids(redis_client) == ["1-0", "1-1", "2-0", "2-2", "2-4", "2-5"]


def test_an_expired_stream_is_not_recreated(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    writer.claim("r", "w")
    redis_client.delete(stream_key("r"))
    assert writer.publish([chunk(1, 1), end(1, 1)]) == {("r", 1): WriteOutcome.GONE}
    assert not redis_client.exists(stream_key("r"))


def test_every_write_renews_the_life_of_the_stream(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    writer.claim("r", "w")
    assert 0 < redis_client.ttl(stream_key("r")) <= TTL
    for write in (chunk(1, 1), end(1, 1)):
        redis_client.expire(stream_key("r"), 5)
        writer.publish([write])
        assert redis_client.ttl(stream_key("r")) > 5
    redis_client.expire(stream_key("r"), 5)
    writer.publish([chunk(1, 1)])  # a rejected write does not renew it
    assert redis_client.ttl(stream_key("r")) <= 5


def test_the_stream_of_a_request_handed_back_lives_for_a_day_until_its_claim(
    writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    writer.claim("r", "w")
    writer.keep("r")
    assert redis_client.ttl(stream_key("r")) > 86_000
    writer.claim("r", "w")
    assert redis_client.ttl(stream_key("r")) <= TTL


def test_a_request_cancelled_after_it_was_handed_back_does_not_continue(
    writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    writer.claim("r", "w")
    writer.keep("r")
    cancel(redis_client)
    assert redis_client.ttl(stream_key("r")) > 86_000
    assert redis_client.ttl(ended_key("r")) > 86_000


def test_many_streams_are_written_in_one_call_that_returns_only_failures(
    writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    for number in range(64):
        writer.claim(f"r{number}", "w")
    writer.claim("r3", "another")
    redis_client.delete(stream_key("r5"))
    cancel(redis_client, "r7")
    writer.publish([chunk(1, 1, "nobody")])  # loads the script into the server
    calls = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]
    outcomes = writer.publish([chunk(1, 1, f"r{number}") for number in range(64)])
    assert redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] == calls + 1
    assert outcomes == {
        ("r3", 1): WriteOutcome.FENCED,
        ("r5", 1): WriteOutcome.GONE,
        ("r7", 1): WriteOutcome.CANCELLED,
    }
    assert all(entry_ids(redis_client, f"r{number}") == ["1-0", "1-1"] for number in (0, 1, 2, 4, 6, 63))


def test_publishing_nothing_sends_no_command(writer: StreamWriter) -> None:
    assert writer.publish([]) == {}


def test_a_key_of_another_type_ends_its_own_request_and_no_other_of_the_same_call(
    writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    writer.claim("other", "w")
    redis_client.set(stream_key("r"), "x")
    assert writer.publish([chunk(1, 1), chunk(1, 1, "other")]) == {("r", 1): WriteOutcome.GONE}
    assert entry_ids(redis_client, "other")[-1] == "1-1"


def test_scripts_are_loaded_again_after_the_server_lost_them(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    writer.claim("r", "w")
    redis_client.script_flush()
    assert writer.publish([chunk(1, 1)]) == {}
    assert writer.claim("r", "w").attempt == 2


def test_a_subscriber_that_left_resumes_across_a_takeover(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    writer.claim("r", "a")
    writer.publish([chunk(1, 1), chunk(1, 2)])
    left_at = "1-1"
    writer.claim("r", "b")
    writer.publish([chunk(2, 3), end(2, 3)])
    events = list(read_stream(redis_client, "r", last_id=left_at))
    assert [event.entry_id for event in events] == ["1-2", "2-0", "2-3", "2-4"]
    assert list(read_stream(redis_client, "r", last_id="2-4")) == []


def expire(client: "redis.Redis", request_id: str = "r") -> None:
    assert client.ttl(ended_key(request_id)) >= client.ttl(stream_key(request_id)) + ENDED_SECONDS
    client.delete(stream_key(request_id))


@pytest.mark.parametrize("how", ["by its worker", "from outside", "in the queue"])
def test_a_late_subscriber_gets_an_error_and_an_early_one_waits(
    writer: StreamWriter, redis_client: "redis.Redis", how: str
) -> None:
    with pytest.raises(ResultTimeoutError):
        next(read_stream(redis_client, "r", timeout=0))
    if how != "in the queue":
        writer.claim("r", "w")
        writer.publish([chunk(1, 1)])
    if how == "by its worker":
        writer.publish([chunk(1, 2), end(1, 2), chunk(1, 9, "unknown")])
    else:
        cancel(redis_client)
    expire(redis_client)
    with pytest.raises(StreamExpiredError, match="the last entry read was 0-0"):
        next(read_stream(redis_client, "r"))
    request_id, item = next(read_streams(redis_client, {"early": "0-0", "r": "0-0"}, timeout=60))
    assert (request_id, type(item)) == ("r", StreamExpiredError)


def test_a_stream_that_expired_without_an_end_may_continue(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    writer.claim("r", "w")
    redis_client.delete(stream_key("r"))
    with pytest.raises(ResultTimeoutError):
        next(read_stream(redis_client, "r", timeout=0))


def test_a_request_claimed_again_after_its_stream_expired_has_not_ended(
    writer: StreamWriter, redis_client: "redis.Redis"
) -> None:
    writer.claim("r", "w")
    writer.publish([end(1, 0)])
    expire(redis_client)
    assert writer.claim("r", "another").attempt == 1
    redis_client.delete(stream_key("r"))  # it expired while its worker wrote nothing
    with pytest.raises(ResultTimeoutError):
        next(read_stream(redis_client, "r", timeout=0.01))


def test_a_refused_end_of_a_zombie_sets_no_end_mark(writer: StreamWriter, redis_client: "redis.Redis") -> None:
    writer.claim("r", "zombie")
    writer.claim("r", "successor")
    writer.claim("other", "w")
    writer.publish([end(1, 5), end(1, 0, "other")])
    assert not redis_client.exists(ended_key("r"))
    assert redis_client.exists(ended_key("other"))


def test_a_late_subscriber_of_a_deleted_stream_gets_an_error(redis_client: "redis.Redis", writer: StreamWriter) -> None:
    attempt = writer.claim("r", "w").attempt
    redis_client.delete(stream_key("r"))
    write = StreamWrite.chunk("r", attempt, 1, index=0, token_ids=[7], text="x")
    assert writer.publish([write]) == {("r", attempt): WriteOutcome.GONE}
    writer.mark_gone("r")
    with pytest.raises(StreamExpiredError):
        list(read_stream(redis_client, "r"))
    writer.claim("r", "w")  # begins a new stream
    assert not redis_client.exists(ended_key("r"))
