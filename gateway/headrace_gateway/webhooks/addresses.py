"""Which addresses a webhook may reach. The owner of a host's DNS entry can point it into this network.

Source: IANA's registries of special-purpose IPv4 and IPv6 addresses. The tables are ours, since Python's change between
releases.
"""

import ipaddress
from typing import Final

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
"""Reached only if the operator allows it for the endpoint."""
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
