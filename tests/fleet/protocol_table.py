"""`TableChanges`: an operator of a schedule, who adds, drains and forgets stream servers while the request runs."""

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Final

import redis

from fleet.virtual_time import Actor, VirtualTime
from headrace_broker.errors import SettingsError
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.server.stream_table_editor import StreamTableEditor

_PAUSE_SECONDS: Final = (2.0, 20.0)
_TTL_SECONDS: Final = 3600


class TableChanges:
    """Changes the table by the product's editor. At the start, one server gets new streams.

    Args:
        queue_client: of the server with the table.
        servers: clients of the stream servers by name.
        calm_at: virtual time after which the table is not changed.
    """

    def __init__(
        self,
        queue_client: "redis.Redis",
        servers: Mapping[str, "redis.Redis"],
        time: VirtualTime,
        random: Random,
        calm_at: float,
    ) -> None:
        self._servers = StreamServers(queue_client, servers, _TTL_SECONDS)
        self._editor = StreamTableEditor(self._servers)
        self._names, self._time, self._random, self._calm_at = sorted(servers), time, random, calm_at
        self._editor.enable([random.choice(self._names)])
        self.counts: Counter[str] = Counter()

    def run(self) -> Actor:
        """Change the table again and again."""
        while self._time.now < self._calm_at:
            yield self._random.uniform(*_PAUSE_SECONDS)
            self._change(self._random.choice(self._names))

    def _change(self, name: str) -> None:
        """Add a server, drain it if it gets new streams and is not the only one, or forget it if it is drained."""
        rows = self._servers.refresh().rows
        row = rows.get(name)
        try:
            if row is None:
                self._editor.add(name)
            elif row.until is not None:
                self._editor.forget(name)
            elif sum(each.until is None for each in rows.values()) > 1:
                self._editor.drain(name)
            else:
                return
        except SettingsError:  # it still has the stream, or the message has it there
            self.counts["forgets refused"] += 1
        else:
            self.counts["table changes"] += 1
