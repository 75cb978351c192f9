"""`TenantScan`: reads every key of every server, and finds what is stored of a tenant."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgpack
import redis

from headrace_broker.keys import (
    arrived_key,
    costs_key,
    dead_letters_key,
    ended_key,
    engine_losses_key,
    holders_key,
    idempotency_key,
    lease_bodies_key,
    lease_records_key,
    listener_key,
    queue_name,
    reserved_key,
    reserved_tokens_key,
    result_key,
    sent_key,
    served_key,
    spent_key,
    stream_key,
    tenant_requests_key,
    tenants_key,
    waiting_key,
)
from headrace_broker.queue.dead_letters import dead_letters
from headrace_broker.queue.final_writes import DEAD
from headrace_broker.queue.message_envelope import legible_envelope, request_id_of
from headrace_cli.erase.servers import Servers
from headrace_gateway.batch.record import ENDED
from headrace_gateway.redis.keys import (
    batch_key,
    batches_key,
    charged_key,
    deleted_key,
    delivery_key,
    due_key,
    envelope_key,
    rate_key,
    response_key,
    stored_bytes_key,
    stored_key,
    tokens_key,
    undelivered_key,
)

_AT_ONCE: Final = 1000
_USAGE: Final = "headrace:usage:"
_OF_REQUEST: Final[dict[str, Callable[[str], str]]] = {
    "streams": stream_key,
    "results": result_key,
    "marks of requests": ended_key,
    "marks of readers": listener_key,
    "counts of lost engines": engine_losses_key,
    "marks of sent answers": sent_key,
    "marks of sent errors": lambda request_id: sent_key(request_id) + DEAD,
}
_OF_ANSWER: Final[dict[str, Callable[[str], str]]] = {
    "envelopes": envelope_key,
    "responses": response_key,
    "charges": charged_key,
    "marks of deleted responses": deleted_key,
}
LISTS_OF_REQUESTS: Final = "lists of requests"
"""The kind of the keys that name the requests of a tenant. They must be removed last."""
_LONGEST_CONVERSATION: Final = 32
_OF_KEY: Final = (rate_key, reserved_key, reserved_tokens_key)


class Trace(NamedTuple):
    """A key, or a member of one."""

    server: "redis.Redis"
    kind: str
    key: str
    member: bytes | None = None


@dataclass(slots=True)
class Findings:
    """What one scan has found, and the names by which the next one finds the rest."""

    traces: list[Trace] = field(default_factory=list)
    rows: list[Trace] = field(default_factory=list)
    """Rows of the usage ledger."""
    open_requests: set[str] = field(default_factory=set)
    open_batches: set[str] = field(default_factory=set)
    requests: set[str] = field(default_factory=set)
    answers: set[str] = field(default_factory=set)
    """Ids of answers, batches and events."""
    key_names: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)
    """Folders of files: those of `batches_key`."""

    @property
    def is_open(self) -> bool:
        return bool(self.open_requests or self.open_batches)


class TenantScan:
    """Redis's errors pass through.

    Args:
        owner_of: returns the folder of an API key's files from its name and tenant.
        known: of an earlier scan. Its ids and names are searched again.
        foreign: names of API keys of other tenants, whose limits stay. None if they are not known: then all stay,
            because rows of the ledger may have any name that a producer has written.
    """

    def __init__(
        self,
        servers: Servers,
        tenant: str,
        owner_of: Callable[[str, str | None], str],
        known: Findings | None = None,
        foreign: Collection[str] | None = None,
    ) -> None:
        known = known or Findings()
        self._servers: Final = servers
        self._tenant: Final = tenant
        self._member: Final = tenant.encode()
        self._owner_of: Final = owner_of
        self._foreign: Final = foreign
        self._found: Final = Findings(
            requests=set(known.requests), answers=set(known.answers), key_names=set(known.key_names)
        )
        self._read: Final[list[tuple[str, Callable[[redis.Redis, str], None]]]] = [
            (tenant_requests_key(tenant), self._requests_of_tenant),
            (lease_records_key(""), self._records),
            (holders_key(""), self._holders),
            (arrived_key(""), self._messages),
            (queue_name(""), self._messages),
            (dead_letters_key(""), self._dead_letters),
            (idempotency_key(tenant, ""), self._whole("idempotency keys")),
            (_USAGE, self._ledger),
            (envelope_key(""), self._envelope),
            (delivery_key("", "").rstrip(":"), self._delivery),
            (batch_key(""), self._batch),
            *((build(""), self._members("shares of queues")) for build in (served_key, costs_key)),
            *((build(""), self._members("shares of queues")) for build in (tenants_key, waiting_key)),
        ]

    def run(self) -> Findings:
        for server in self._servers.all:
            for name in server.scan_iter(count=_AT_ONCE):
                try:
                    key = name.decode()
                except UnicodeDecodeError:
                    continue  # it names another tenant
                read = next((read for prefix, read in self._read if key.startswith(prefix)), None)
                if read is not None:
                    try:
                        read(server, key)
                    except redis.ResponseError as error:
                        if "WRONGTYPE" not in str(error):
                            raise
                        continue  # written by hand, so it has nothing of a tenant
        self._by_names()
        return self._found

    # -- keys that name the tenant ---------------------------------------------------------------------------------

    def _requests_of_tenant(self, server: "redis.Redis", key: str) -> None:
        if key == tenant_requests_key(self._tenant):
            found: Any = server.zrange(key, 0, -1)
            self._found.requests.update(request_id.decode() for request_id in found)
            self._add(server, LISTS_OF_REQUESTS, key)

    def _records(self, server: "redis.Redis", key: str) -> None:
        found: Any = server.hgetall(key)
        for lease_id, packed in found.items():
            record = _unpacked(packed)
            tenant = record.get(b"tenant")
            if tenant == b"":  # a worker sorted it while messages of too many tenants waited
                body: Any = server.hget(lease_bodies_key(key.removeprefix(lease_records_key(""))), lease_id)
                is_own = self._is_own(legible_envelope(body or b"").get("headers"))
            else:
                is_own = tenant == self._member
            if is_own:
                self._found.open_requests.add(bytes(record.get(b"request") or b"?").decode(errors="replace"))

    def _holders(self, server: "redis.Redis", key: str) -> None:
        found: Any = server.hkeys(key)
        for name in found:
            conversation = name.removesuffix(b" " + self._member)
            if conversation != name and len(conversation) <= _LONGEST_CONVERSATION:
                self._add(server, "holders of conversations", key, name)

    def _messages(self, server: "redis.Redis", key: str) -> None:
        found: Any = server.lrange(key, 0, -1) if server.type(key) == b"list" else ()
        for message in found:
            envelope = legible_envelope(message)
            if self._is_own(envelope.get("headers")):
                self._found.open_requests.add(request_id_of(envelope) or "?")

    def _dead_letters(self, server: "redis.Redis", key: str) -> None:
        for letter in dead_letters(server, key.removeprefix(dead_letters_key(""))):
            if self._is_own(letter.headers):
                self._found.requests.update({letter.request_id} if letter.request_id else ())
                self._add(server, "dead letters", key, letter.packed)

    def _ledger(self, server: "redis.Redis", key: str) -> None:
        found: Any = server.hkeys(key)
        for row in found:
            names = _unpacked_list(row)
            if names and names[0] == self._member:
                self._found.key_names.update({names[1].decode(errors="replace")} - {""})
                self._found.rows.append(Trace(server, "rows of the ledger", key, row))

    def _envelope(self, server: "redis.Redis", key: str) -> None:
        envelope = _unpacked(server.get(key))
        if envelope.get(b"tenant") == self._member:
            self._found.answers.add(key.removeprefix(envelope_key("")))
            self._found.requests.update(each.decode() for each in envelope.get(b"request_ids") or ())
            self._found.key_names.add(envelope[b"key"].decode())

    def _delivery(self, server: "redis.Redis", key: str) -> None:
        event = _unpacked(server.get(key)).get(b"event")
        if isinstance(event, dict) and event.get(b"tenant") == self._member:
            endpoint, event_id = key.split(":")[-2:]
            self._found.answers.add(event_id)
            self._add(server, "webhook deliveries", key)
            for index in (undelivered_key(endpoint), due_key(f"webhook:{endpoint}"), tokens_key(f"webhook:{endpoint}")):
                self._member_of(server, "webhook deliveries", index, event_id.encode())

    def _batch(self, server: "redis.Redis", key: str) -> None:
        fields: Any = server.hmget(key, ["record", "status"])
        packed, status = fields
        record = _unpacked(packed)
        if record.get(b"tenant") == self._member:
            batch_id = key.removeprefix(batch_key(""))
            if (status or b"").decode() not in ENDED:
                self._found.open_batches.add(batch_id)
            self._found.answers.add(batch_id)
            self._found.key_names.add(record[b"key"].decode())
            self._add(server, "batches", key)

    # -- keys that are found by the names of other ones --------------------------------------------------------------

    def _by_names(self) -> None:
        found, main = self._found, self._servers.main
        for kind, build in _OF_REQUEST.items():
            for server in self._servers.all:
                self._existing(server, kind, map(build, found.requests | found.answers))
        for kind, build in _OF_ANSWER.items():
            self._existing(main, kind, map(build, found.requests | found.answers))
        for work in ("responses", "batches"):
            for answer_id in found.answers:
                for key in (due_key(work), tokens_key(work)):
                    self._member_of(main, "open work", key, answer_id.encode())
        owner = f"tenant:{self._tenant}"
        self._existing(main, "counts of bytes", (stored_key(owner), stored_bytes_key(owner)))
        found.owners.update(self._owner_of(name, self._tenant) for name in found.key_names)
        self._existing(main, "lists of batches", map(batches_key, found.owners))
        own_names = set() if self._foreign is None else found.key_names - {*self._foreign}
        for server in self._servers.all if own_names else ():
            self._existing(server, "limits of keys", (build(name) for build in _OF_KEY for name in own_names))
            for spent in server.scan_iter(match=spent_key(0)[:-1] + "*", count=_AT_ONCE):
                for name in own_names:
                    self._member_of(server, "limits of keys", spent.decode(), name.encode())

    def _existing(self, server: "redis.Redis", kind: str, keys: Iterable[str]) -> None:
        names = sorted(set(keys))
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            with server.pipeline(transaction=False) as pipe:
                for name in some:
                    pipe.exists(name)
                for name, exists in zip(some, pipe.execute(), strict=True):
                    if exists:
                        self._add(server, kind, name)

    def _whole(self, kind: str) -> Callable[["redis.Redis", str], None]:
        return lambda server, key: self._add(server, kind, key)

    def _members(self, kind: str) -> Callable[["redis.Redis", str], None]:
        return lambda server, key: self._member_of(server, kind, key, self._member)

    def _member_of(self, server: "redis.Redis", kind: str, key: str, member: bytes) -> None:
        type_of: Any = server.type(key)
        has = {b"zset": server.zscore, b"hash": server.hget}.get(type_of)
        if has is not None and has(key, member) is not None:
            self._add(server, kind, key, member)

    def _add(self, server: "redis.Redis", kind: str, key: str, member: bytes | None = None) -> None:
        self._found.traces.append(Trace(server, kind, key, member))

    def _is_own(self, headers: object) -> bool:
        return isinstance(headers, dict) and headers.get("tenant") == self._tenant


def _unpacked(packed: Any) -> dict[bytes, Any]:
    try:
        found = msgpack.unpackb(packed, raw=True, strict_map_key=False)
    except Exception:  # noqa: BLE001  # written by hand; msgpack's errors have no common base
        return {}
    return found if isinstance(found, dict) else {}


def _unpacked_list(packed: bytes) -> list[Any]:
    try:
        found = msgpack.unpackb(packed, raw=True)
    except Exception:  # noqa: BLE001  # as above
        return []
    return found if isinstance(found, list) else []
