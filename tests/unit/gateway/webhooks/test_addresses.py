"""Which addresses a webhook may reach."""

import pytest

from headrace_gateway.webhooks.network import refusal_of


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "100.63.255.255", "100.128.0.0", "172.32.0.1", "2606:4700::1111", "2a00::1"]
)
def test_public_addresses_are_reached(address: str) -> None:
    assert refusal_of(address, allow_private=False) is None
    assert refusal_of(address, allow_private=True) is None


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
        *("100.64.0.1", "100.127.255.255", "::1", "fc00::1", "fdff::1", "0:0:0:0:0:0:0:1"),
    ],
)
def test_private_addresses_are_reached_only_where_the_operator_allows_it(address: str) -> None:
    assert "allow_private" in (refusal_of(address, allow_private=False) or "")
    assert refusal_of(address, allow_private=True) is None


@pytest.mark.parametrize(
    "address",
    [
        *(
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "192.0.0.8",
            "192.0.2.1",
            "192.88.99.1",
            "198.18.0.1",
            "198.19.255.1",
        ),
        *("198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
        *("::", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "100::1"),
        *(
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "3fff::1",
            "fe80::1",
            "fe80::1%lo",
            "fec0::1",
            "ff02::1",
            "4000::1",
        ),
        *("168.63.129.16", "100.100.100.200", "fd00:ec2::254"),
        *("localhost", "127.1", "0x7f000001", "2130706433", "", "127.0.0.1:80", "[::1]"),
    ],
)
def test_special_purpose_addresses_are_never_reached(address: str) -> None:
    assert refusal_of(address, allow_private=False) is not None
    assert refusal_of(address, allow_private=True) is not None
