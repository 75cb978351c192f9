"""`CheckedNetwork`: connects to the addresses that were checked, without a second DNS lookup.

Without the check, the owner of a host's DNS entry could point it to an address in the operator's network. Source of the
addresses that a webhook may reach: IANA's registries of special-purpose IPv4 and IPv6 addresses. The tables are copied
here, because those of Python's ipaddress change between releases.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpcore2

_THREADS: Final = 16
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host and a port to IP addresses, the preferred one first. Raises OSError."""


_Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


def _networks(*texts: str) -> _Networks:
    return tuple(ipaddress.ip_network(text) for text in texts)


_PRIVATE: Final = _networks(
    "10.0.0.0/8",
    "100.64.0.0/10",  # carrier-grade NAT
    "127.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "::1/128",
    "fc00::/7",
)
"""Networks that are reached only if the operator allows it for the endpoint."""
_NEVER: Final = _networks(
    "0.0.0.0/8",
    "100.100.100.200/32",  # Alibaba Cloud's metadata
    "168.63.129.16/32",  # Azure's metadata
    "fd00:ec2::254/128",  # AWS's metadata
    "169.254.0.0/16",  # link-local; clouds serve credentials there
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",  # relays of 6to4
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "2001::/23",  # Teredo and other protocols of IETF
    "2001:db8::/32",
    "2002::/16",  # 6to4 has an IPv4 address within
    "3fff::/20",
)
_PUBLIC_V6: Final = ipaddress.ip_network("2000::/3")
"""All other IPv6 addresses are special: IPv4-mapped, NAT64, link-local, multicast."""


def refusal_of(address: str, *, allow_private: bool) -> str | None:
    """Return why a webhook may not reach this IP address; None if it may."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return f"{address[:64]!r} is not an IP address"
    is_never = _is_in(parsed, _NEVER)
    if not is_never and _is_in(parsed, _PRIVATE):
        return None if allow_private else f"{parsed} is a private address; allow_private = true allows it"
    if is_never or (parsed.version == 6 and parsed not in _PUBLIC_V6):
        return f"{parsed} is a special-purpose address"
    return None


def _is_in(address: ipaddress.IPv4Address | ipaddress.IPv6Address, networks: _Networks) -> bool:
    return any(address in network for network in networks)


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
        return await asyncio.shield(lookup)  # a cancelled caller does not cancel the lookup for the others

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
