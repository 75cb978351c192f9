"""`purge_queue`: ends every waiting request of a queue, and writes the end to its stream and its result.

A message is leased before its stream is ended, and acknowledged after its result is stored. So a purge that fails
midway loses nothing: its messages return to the queue, and a worker answers the ended ones from their streams.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import redis

from headrace_broker.content import answer_type, dumps_result
from headrace_broker.keys import queue_lists, result_key
from headrace_broker.queue.dead_letters import DeadLetter
from headrace_broker.queue.earlier_version import move_all
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.levels import QueueLevelReader
from headrace_broker.queue.message_envelope import content_digest, legible_envelope, request_id_of
from headrace_broker.results import ErrorInfo, GenerateResult, Usage
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.streams.writer import Ending, StreamWriter
from headrace_broker.usage.entry import UsageEntry, key_name_of
from headrace_wire.codes import DeadLetterReason, ErrorCode

_AT_ONCE: Final = 100
_LEASE_SECONDS: Final = 60.0
_ANY_DELIVERIES: Final = 10**9
_PURGED: Final = ErrorInfo(ErrorCode.CANCELLED, "the request was purged from the queue")


@dataclass(frozen=True, slots=True)
class PurgedMessages:
    """How many messages a purge ended."""

    waiting: int
    delayed: int
    """Messages that were not due yet."""


def purge_queue(
    client: "redis.Redis", queue: str, *, ttl_seconds: int, streams: StreamServers | None = None
) -> PurgedMessages:
    """End the messages that are in the queue at the start and held by no worker. Redis's errors pass through.

    The stream and the result of each request that has not ended say that it was cancelled. Both live `ttl_seconds`.

    Args:
        client: the server of the queue.
        streams: the servers of streams, and the main server, which has the results; without them, `client`.
    """
    servers = StreamServers(client, {}, ttl_seconds) if streams is None else streams
    writers: dict[str, StreamWriter] = {}
    lists = queue_lists(queue)
    leases = Leases(client, lease_seconds=_LEASE_SECONDS, delivery_limit=_ANY_DELIVERIES, result_seconds=ttl_seconds)
    move_all(client, queue)
    levels = QueueLevelReader(client).read([queue])[queue]

    def end_request(
        request_id: str, home: str, finish_reason: str, error: ErrorInfo, content: str, content_type: object
    ) -> None:
        home = servers.home_at(home, request_id)
        if home not in writers:
            writers[home] = StreamWriter(servers.of(home), ttl_seconds, home)
        if writers[home].end_unclaimed(request_id, finish_reason, error, content) is Ending.WRITTEN:
            _store_result(servers.main, request_id, error, content_type, ttl_seconds)

    def end_dead(letter: DeadLetter) -> None:  # the fetch makes a message a dead letter if it is too large, for example
        if letter.answered_id is not None:
            about = (letter.error, letter.content, letter.content_type)
            end_request(letter.answered_id, letter.home, "error", *about)

    leases.on_dead_letter = end_dead

    def end(messages: Iterable[LeasedMessage]) -> None:
        for message in messages:
            envelope = legible_envelope(message.body)
            headers = envelope.get("headers")
            request_id = request_id_of(envelope)
            home = leases.bind(message, request_id)
            if home is None:  # another message has the id
                leases.dead_letter(message.lease_id, DeadLetterReason.DUPLICATE_ID)
                continue
            if request_id is not None:
                content = content_digest(envelope, queue)
                end_request(request_id, home, "cancelled", _PURGED, content, envelope.get("content-type"))
            leases.hold(message.lease_id, message)
            # its tenant is not charged, and its key's budget gets the reservation back
            key_name = key_name_of(headers.get("key_name") if isinstance(headers, Mapping) else None)
            leases.cost(message.lease_id, 0, UsageEntry("completions", key_name, Usage(0, 0, 0)))
            leases.ack(message.lease_id)

    def purge(take: Callable[[int], list[LeasedMessage]], most: int) -> int:
        purged = 0
        while purged < most and (messages := take(min(_AT_ONCE, most - purged))):
            end(messages)
            purged += len(messages)
        return purged

    return PurgedMessages(
        waiting=purge(lambda count: leases.fetch(lists, count), levels.num_ready),
        delayed=purge(lambda count: leases.take_delayed(lists, count), levels.delayed),
    )


def _store_result(
    client: "redis.Redis", request_id: str, error: ErrorInfo, content_type: object, ttl_seconds: int
) -> None:
    """Store the result like Celery's Redis backend, in a format that the sender of this content type can read."""
    meta: dict[str, Any] = {
        "task_id": request_id,
        "status": "SUCCESS",
        "result": GenerateResult(request_id, [], None, error).to_wire(),
        "traceback": None,
        "children": [],
        "date_done": datetime.now(UTC).isoformat(),
    }
    packed = dumps_result(meta, answer_type(content_type))
    with client.pipeline(transaction=True) as pipe:
        pipe.set(result_key(request_id), packed, ex=ttl_seconds)
        pipe.publish(result_key(request_id), packed)
        pipe.execute()
