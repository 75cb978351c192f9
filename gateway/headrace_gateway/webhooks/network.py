"""`CheckedNetwork`: connects to the addresses that were checked, without a second DNS lookup."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpcore2

from headrace_gateway.webhooks.addresses import refusal_of

_THREADS: Final = 16
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host and a port to IP addresses, the preferred one first. Raises OSError."""


class AddressRefusedError(Exception):
    """The host resolves to an address that webhooks may not reach."""


class Resolver:
    """The system's resolver, in a thread pool of its own: a lookup may take half a minute, and the queue's client needs
    the default threads.

    Concurrent lookups of one host are shared, so a host that does not resolve holds one thread.
    """

    def __init__(self) -> None:
        self._threads: Final = ThreadPoolExecutor(_THREADS, "webhook-dns")
        self._lookups: Final[dict[tuple[str, int], asyncio.Future[Sequence[str]]]] = {}

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        lookup = self._lookups.get((host, port))
        if lookup is None:
            lookup = asyncio.get_running_loop().run_in_executor(self._threads, _addresses, host, port)
            self._lookups[host, port] = lookup
            lookup.add_done_callback(lambda done: self._ended((host, port), done))
        return await asyncio.shield(lookup)  # a cancelled caller does not cancel it for the others

    def _ended(self, asked: tuple[str, int], lookup: asyncio.Future[Sequence[str]]) -> None:
        del self._lookups[asked]
        if not lookup.cancelled():
            lookup.exception()  # else asyncio logs it as never retrieved

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str, port: int) -> Sequence[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """The network of httpcore for one endpoint.

    Args:
        allow_private: whether the operator lets the endpoint reach private addresses.
    """

    def __init__(self, resolve: Resolve, *, allow_private: bool) -> None:
        self._resolve: Final = resolve
        self._allow_private: Final = allow_private
        self._network: Final = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the first address that answers. Raises AddressRefusedError if any of them is refused."""
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(f"the host does not resolve: {error}") from error
        for address in addresses:
            refusal = refusal_of(address, allow_private=self._allow_private)
            if refusal is not None:
                raise AddressRefusedError(refusal)
        failure: Exception = httpcore2.ConnectError("the host has no address")
        for address in addresses:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure
