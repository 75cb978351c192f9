"""Connections to a Redis Cluster. Those of one pool all go to the node that has one slot.

A connection asks the nodes for the owner of its slot whenever it connects. An answer that sends it elsewhere closes the
connection and raises `RedirectedError`, so the next try asks again. No redirection is followed: `ASK` and `TRYAGAIN`
come only while a slot migrates, and the caller repeats its command until the slot has migrated.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    TryAgainError,
)
from redis.retry import Retry

Address: TypeAlias = tuple[str, int]

_NODE_TIMEOUTS: Final[dict[str, Any]] = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}
"""Of the connections that ask for the slots. They are short, because every connect asks."""
_LOGIN: Final = ("username", "password", "protocol", "driver_info")
_AVOIDED_SECONDS: Final = 2.0
"""How long a node that did not answer in time is not tried. All pools of a process share this."""
_REDIRECTIONS: Final = (MovedError, AskError, TryAgainError, ClusterDownError, MasterDownError, ReadOnlyError)
_TEXTS: Final = ("non local key", "cluster is down", "UNBLOCKED")
"""What errors without a class of their own contain: of commands inside a script, and of a blocking read at a node that
has become a replica."""


class RedirectedError(redis.ConnectionError):
    """The node does not serve the slot, or not now. The command may be repeated: it did not run, or not to its end."""


def redirect_retry() -> Retry:
    """Return a policy that repeats a command once if it was redirected, and never after another error."""
    return Retry(NoBackoff(), 1, supported_errors=(RedirectedError,))


def async_redirect_retry() -> AsyncRetry:
    """Return the same policy for asyncio."""
    return AsyncRetry(NoBackoff(), 1, supported_errors=(RedirectedError,))


class ClusterNodes:
    """The addresses of a cluster's nodes: those that were given, and those that the cluster named.

    Threads may share it.

    Args:
        given: addresses of some nodes.
        clock: monotonic time in seconds.
    """

    def __init__(self, given: Sequence[Address], clock: Callable[[], float] = time.monotonic) -> None:
        self._given: Final = tuple(given)
        self._clock: Final = clock
        self._lock: Final = threading.Lock()
        self._order: list[Address] = list(given)
        self._avoided_until: dict[Address, float] = {}
        self.masters: Final[dict[int, Address]] = {}
        """The nodes to which connections went last, by slot."""

    def to_ask(self) -> list[Address]:
        """Return the nodes in the order in which they are asked. Those that did not answer in time come last."""
        with self._lock:
            return sorted(self._order, key=self._is_avoided)

    def _is_avoided(self, address: Address) -> bool:
        return self._clock() < self._avoided_until.get(address, 0.0)

    def check(self, address: Address) -> None:
        """Raise redis.ConnectionError if the node did not answer in time a moment ago: each try costs a timeout."""
        if self._is_avoided(address):
            raise redis.ConnectionError(f"the node {shown(address)} did not answer in time, and is not tried yet")

    def was_late(self, address: Address) -> None:
        """Take note that a node did not answer in time."""
        with self._lock:
            self._avoided_until[address] = self._clock() + _AVOIDED_SECONDS

    def distrust(self) -> None:
        """Ask another node first next time: the answer of this one may be old."""
        with self._lock:
            self._order = [*self._order[1:], *self._order[:1]]

    def master(self, asked: Address, slots: Any, slot: int) -> Address:
        """Return the node that has a slot, from the reply to CLUSTER SLOTS of the node that was asked.

        Raises RedirectedError if no node has it.
        """
        found: Address | None = None
        named: list[Address] = []
        for first, last, *nodes in slots:
            addresses = [(_text(node[0]) or asked[0], int(node[1])) for node in nodes]
            named += addresses
            if first <= slot <= last:
                found = addresses[0]
        with self._lock:
            self._order = list(dict.fromkeys([asked, *named, *self._given]))
        if found is None:
            raise RedirectedError(f"no node of the Redis Cluster has the slot {slot}, says {shown(asked)}")
        self.masters[slot] = found
        return found


def shown(address: Address) -> str:
    """Format an address for messages."""
    return f"{address[0]}:{address[1]}"


def _text(host: bytes | str | None) -> str:
    text = host.decode() if isinstance(host, bytes) else host or ""
    return "" if text == "?" else text


def slot_options(nodes: ClusterNodes, key: str, **connection: Any) -> dict[str, Any]:
    """Return the options of redis-py's pools for connections to the node that has the slot of a key."""
    return {"nodes": nodes, "slot": key_slot(key.encode()), **connection}


def address_of_slot(options: dict[str, Any]) -> str | None:
    """Return the node to which a pool with these options connects, for messages; None if it is not of a cluster."""
    nodes = options.get("nodes")
    if not isinstance(nodes, ClusterNodes):
        return None
    return shown(nodes.masters.get(options["slot"]) or nodes.to_ask()[0])


class _OfSlot:
    """What the connections for threads and for asyncio have in common. The next base class is one of redis-py's."""

    host: str
    port: int

    def __init__(self, *, nodes: ClusterNodes, slot: int, **options: Any) -> None:
        super().__init__(**options)
        self._nodes: Final = nodes
        self._slot: Final = slot
        self._asking: Final = {
            **{name: value for name, value in options.items() if name in _LOGIN or name.startswith("ssl_")},
            **_NODE_TIMEOUTS,
        }
        """The options of a connection that asks for the slots."""

    def _go_to(self, address: Address) -> None:
        self._nodes.check(address)
        self.host, self.port = address

    def _unreachable(self, reasons: Sequence[Exception]) -> redis.ConnectionError:
        tried = ", ".join(map(shown, self._nodes.to_ask()))
        return redis.ConnectionError(f"no node of the Redis Cluster can be reached; tried {tried}: {reasons[0]}")


def _is_redirection(error: redis.ResponseError) -> bool:
    return isinstance(error, _REDIRECTIONS) or any(text in str(error) for text in _TEXTS)


class SlotConnection(_OfSlot, redis.Connection):
    """Goes to the node that has its slot."""

    def _connect(self) -> Any:
        address = self._master()
        self._go_to(address)
        try:
            return super()._connect()  # type: ignore[no-untyped-call]
        except TimeoutError:
            self._nodes.was_late(address)
            raise

    def _master(self) -> Address:
        failures: list[Exception] = []
        for asked in self._nodes.to_ask():
            connection = self._plain(host=asked[0], port=asked[1], **self._asking)
            try:
                connection.connect()
                connection.send_command("CLUSTER", "SLOTS")
                return self._nodes.master(asked, connection.read_response(), self._slot)
            except NoPermissionError:
                raise
            except redis.RedisError as error:  # also if the server is no node of a cluster
                failures.append(error)
                if isinstance(error, redis.TimeoutError):
                    self._nodes.was_late(asked)
            finally:
                connection.disconnect()
        raise self._unreachable(failures)

    def _plain(self, **options: Any) -> Any:
        return redis.Connection(**options)  # type: ignore[no-untyped-call]

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Read a reply. Raises RedirectedError, and closes the connection, if the slot is elsewhere."""
        try:
            return super().read_response(*args, **options)
        except redis.ResponseError as error:
            if not _is_redirection(error):
                raise
            self.disconnect()  # type: ignore[no-untyped-call]
            self._nodes.distrust()
            raise RedirectedError(str(error)) from error


class TlsSlotConnection(SlotConnection, redis.SSLConnection):
    """`SlotConnection` over TLS."""

    def _plain(self, **options: Any) -> Any:
        return redis.SSLConnection(**options)


class AsyncSlotConnection(_OfSlot, redis.asyncio.Connection):
    """`SlotConnection` for asyncio."""

    async def _connect(self) -> None:
        address = await self._master()
        self._go_to(address)
        try:
            await super()._connect()  # type: ignore[no-untyped-call]
        except TimeoutError:
            self._nodes.was_late(address)
            raise

    async def _master(self) -> Address:
        failures: list[Exception] = []
        for asked in self._nodes.to_ask():
            connection = self._plain(host=asked[0], port=asked[1], **self._asking)
            try:
                await connection.connect()
                await connection.send_command("CLUSTER", "SLOTS")
                return self._nodes.master(asked, await connection.read_response(), self._slot)
            except NoPermissionError:
                raise
            except redis.RedisError as error:  # also if the server is no node of a cluster
                failures.append(error)
                if isinstance(error, redis.TimeoutError):
                    self._nodes.was_late(asked)
            finally:
                await connection.disconnect()
        raise self._unreachable(failures)

    def _plain(self, **options: Any) -> Any:
        return redis.asyncio.Connection(**options)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """See `SlotConnection.read_response`."""
        try:
            return await super().read_response(*args, **options)
        except redis.ResponseError as error:
            if not _is_redirection(error):
                raise
            await self.disconnect(nowait=True)
            self._nodes.distrust()
            raise RedirectedError(str(error)) from error


class AsyncTlsSlotConnection(AsyncSlotConnection, redis.asyncio.SSLConnection):
    """`AsyncSlotConnection` over TLS."""

    def _plain(self, **options: Any) -> Any:
        return redis.asyncio.SSLConnection(**options)
