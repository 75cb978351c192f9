"""`Poster`: one POST to one endpoint. It follows no redirects, uses no proxy, and ignores the response's body."""

import asyncio
import contextlib
import email.utils
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import httpcore2

from headrace_gateway.webhooks.endpoint_file import Endpoint
from headrace_gateway.webhooks.network import AddressRefusedError, CheckedNetwork, Resolve
from headrace_gateway.webhooks.outbox import Attempt

_SECONDS: Final = 15.0
_CONNECT_SECONDS: Final = 5.0
_DRAIN_SECONDS: Final = 2.0
_DRAIN_BYTES: Final = 64 * 2**10


class Poster:
    """Makes the attempts of one replica.

    Args:
        resolve: resolves a host to addresses.
        tls: verifies certificates and host names; None: with the system's authorities, or those of SSL_CERT_FILE.
        seconds: time limit of an attempt, from the DNS lookup to the status.
    """

    def __init__(self, resolve: Resolve, *, tls: ssl.SSLContext | None = None, seconds: float = _SECONDS) -> None:
        self._resolve: Final = resolve
        self._tls: Final = ssl.create_default_context() if tls is None else tls
        self._seconds: Final = seconds

    async def __call__(self, endpoint: Endpoint, headers: Mapping[str, str], body: bytes) -> Attempt:
        """Make an attempt, on a new connection to an address that was checked for it."""
        answers: list[Attempt] = []
        try:
            async with asyncio.timeout(self._seconds):
                await self._exchange(endpoint, headers, body, answers)
        except TimeoutError:
            failure = f"no answer within {self._seconds:g} s"
        except AddressRefusedError as error:
            failure = str(error)
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError) as error:
            failure = f"{type(error).__name__}: {str(error)[:200]}".removesuffix(": ")
        else:
            failure = ""
        return answers[0] if answers else Attempt(failure=failure)

    async def _exchange(
        self, endpoint: Endpoint, headers: Mapping[str, str], body: bytes, answers: list[Attempt]
    ) -> None:
        """Append the response as soon as its headers arrive, so that its body cannot change the outcome."""
        network = CheckedNetwork(self._resolve, allow_private=endpoint.allow_private)
        all_headers = {
            "host": urlsplit(endpoint.url).netloc,
            "user-agent": "Headrace",
            "content-type": "application/json",
            **headers,
        }
        async with (
            httpcore2.AsyncConnectionPool(
                ssl_context=self._tls, max_keepalive_connections=0, network_backend=network
            ) as pool,
            pool.stream(
                "POST",
                endpoint.url,
                headers=list(all_headers.items()),
                content=body,
                extensions={"timeout": {"connect": _CONNECT_SECONDS}},
            ) as response,
        ):
            answers.append(Attempt(response.status, retry_after=_retry_after(response.headers)))
            await _drain(response)


async def _drain(response: httpcore2.Response) -> None:
    """Read a short body, so that the receiver's server does not log a dropped connection."""
    size = 0
    with contextlib.suppress(TimeoutError):  # only the status counts
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for part in response.aiter_stream():
                size += len(part)
                if size > _DRAIN_BYTES:
                    return


def _retry_after(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """Parse seconds or a date into seconds; None if absent or invalid."""
    text = next((value for name, value in headers if name.lower() == b"retry-after"), b"").decode("latin-1").strip()
    if text.isdecimal() and text.isascii() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
