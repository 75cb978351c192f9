"""The gateway's application in the test's own process, on a real server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from headrace_gateway import GatewaySettings, make_app
from headrace_gateway.keys.key_file import new_key
from headrace_monitoring.gateway_metrics import GatewayMetrics


@asynccontextmanager
async def running_app(redis_url: str, **options: Any) -> AsyncIterator[tuple[Any, httpx2.AsyncClient]]:
    """The application and an HTTP client. `metrics` goes to the application, the rest to its settings."""
    metrics = options.pop("metrics", None) or GatewayMetrics()
    app = make_app(GatewaySettings(redis_url=redis_url, **options), metrics=metrics)
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client,
    ):
        yield app, client


def write_keys(path: Path, *names: str, have_tenants: bool = False, **rights: str) -> dict[str, str]:
    """Write a key file; return the keys by name.

    Args:
        have_tenants: give each key a tenant of its name.
        rights: TOML lines for every key.
    """
    made = {name: new_key(name) for name in names}
    lines = "".join(f"{name} = {value}\n" for name, value in rights.items())
    entries = (entry + lines + (f'tenant = "{name}"\n' if have_tenants else "") for name, (_, entry) in made.items())
    path.write_text("".join(entries), encoding="utf-8")
    return {name: key for name, (key, _) in made.items()}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
