"""Which address a webhook reaches: the checked one, with a certificate for the operator's host name."""

import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace_gateway.webhooks.network import Resolver
from headrace_gateway.webhooks.outbox import Attempt
from headrace_gateway.webhooks.post import Poster
from service.certificates import Certificates, needs_openssl
from service.gateway.webhooks.conftest import endpoint
from service.gateway.webhooks.receiver import Receiver, endless_body, hang, status


class Names:
    """A DNS server that gives each answer once."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        return self.answers.pop(0)


async def post(url: str, names: Names, *, allow_private: bool = True, **options: object) -> Attempt:
    poster = Poster(names, **options)  # type: ignore[arg-type]
    return await poster(endpoint("a", url, allow_private=allow_private), {"webhook-id": "evt_1"}, b"{}")


async def test_a_private_address_is_refused_unless_it_is_allowed() -> None:
    async with Receiver() as receiver:
        url = f"http://hooks.example.org:{receiver.port}/x"
        refused = await post(url, Names(["127.0.0.1"]), allow_private=False)
        assert refused.status is None
        assert "127.0.0.1 is a private address" in refused.failure
        assert receiver.received == []
        assert (await post(url, Names(["127.0.0.1"]))).status == 204
        (got,) = receiver.received
        assert got.headers["host"] == f"hooks.example.org:{receiver.port}"


async def test_one_private_address_among_public_ones_is_enough_to_refuse() -> None:
    async with Receiver() as receiver:
        url = f"http://hooks.example.org:{receiver.port}/"
        attempt = await post(url, Names(["93.184.216.34", "127.0.0.1"]), allow_private=False)
        assert "private address" in attempt.failure
        attempt = await post(url, Names(["127.0.0.1", "169.254.169.254"]))
        assert "special-purpose" in attempt.failure
        assert receiver.received == []


async def test_a_host_is_resolved_once_and_the_checked_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lookup(*args: object, **_rest: object) -> object:
        raise AssertionError(f"looked up again: {args}")

    async with Receiver() as receiver:
        names = Names(["127.0.0.1"], ["10.0.0.1"])
        monkeypatch.setattr(socket, "getaddrinfo", no_lookup)
        assert (await post(f"http://rebinding.example:{receiver.port}/", names)).status == 204
    assert names.asked == [("rebinding.example", receiver.port)]


async def test_the_next_address_is_tried_if_one_does_not_answer() -> None:
    async with Receiver() as receiver:
        names = Names(["127.0.0.2", "127.0.0.1"])  # the receiver listens on 127.0.0.1 only
        assert (await post(f"http://two.example:{receiver.port}/", names)).status == 204


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Receiver() as proxy, Receiver() as receiver:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert (await post(f"http://a.example:{receiver.port}/", Names(["127.0.0.1"]))).status == 204
        assert len(receiver.received) == 1
        assert proxy.received == []


@needs_openssl
async def test_a_certificate_is_checked_against_the_name_of_the_host(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificates.server, certificates.server_key)
    trusting = ssl.create_default_context(cafile=certificates.ca)
    async with Receiver(tls=serving) as receiver:
        url = f"https://localhost:{receiver.port}/"
        assert (await post(url, Names(["127.0.0.1"]), tls=trusting)).status == 204
        for wrong in (
            await post(f"https://hooks.example.org:{receiver.port}/", Names(["127.0.0.1"]), tls=trusting),
            await post(url, Names(["127.0.0.1"]), tls=ssl.create_default_context(cafile=certificates.other_ca)),
            await post(url, Names(["127.0.0.1"])),
        ):
            assert wrong.status is None
            assert "CERTIFICATE_VERIFY_FAILED" in wrong.failure
        assert len(receiver.received) == 1
        assert (await post(f"https://127.0.0.1:{receiver.port}/", Names(["127.0.0.1"]), tls=trusting)).status == 204


async def test_a_host_that_does_not_resolve_is_a_failure() -> None:
    resolver = Resolver()
    try:
        attempt = await Poster(resolver)(endpoint("a", "http://no-such-host.invalid/"), {}, b"{}")
    finally:
        resolver.close()
    assert attempt.status is None
    assert "the host does not resolve" in attempt.failure


async def test_little_of_a_long_body_is_read() -> None:
    sent: list[int] = []
    async with Receiver(endless_body(200, sent)) as receiver:
        assert (await post(receiver.url, Names(["127.0.0.1"]))).status == 200
    assert sum(sent) < 12 * 2**20  # what the buffers of both sockets can hold


async def test_an_attempt_times_out() -> None:
    async with Receiver(hang) as receiver:
        attempt = await post(receiver.url, Names(["127.0.0.1"]), seconds=0.2)
    assert attempt == Attempt(failure="no answer within 0.2 s")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("17", 17.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("soon", None), ("-1", None), ("1e9", None), ("", None)],
)
async def test_retry_after_is_a_number_of_seconds_or_a_date(header: str, seconds: float | None) -> None:
    async with Receiver(status(503, f"retry-after: {header}")) as receiver:
        attempt = await post(receiver.url, Names(["127.0.0.1"]))
    assert attempt == Attempt(503, retry_after=seconds)
