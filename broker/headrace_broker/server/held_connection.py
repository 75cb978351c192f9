"""`HeldConnection`: a connection that one caller keeps for a while, to run a script at every step of an engine.

Taking a connection from redis-py's pool for each call and returning it costs more than the call itself.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import redis
from redis.commands.core import Script
from redis.exceptions import NoScriptError

from headrace_broker.server.cluster import RedirectedError

HELD_SECONDS: Final = 1.0
"""How long a connection is kept. After that, the pool checks whether the server has closed it, and reconnects. Before
that, a call over a closed connection fails."""


class HeldConnection:
    """Keeps a connection of a client's pool; used by one thread only. After an error, the next call takes a new one."""

    def __init__(self, client: "redis.Redis", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool: Final = client.connection_pool
        self._clock: Final = clock
        self._connection: Any = None
        self._held_until = 0.0

    def send(self, script: "Script", args: Sequence[str | int | bytes], keys: Sequence[str] = ()) -> None:
        """Send a call. The next one of this object must be `has_reply` or `receive`. Redis's errors pass through."""
        if self._connection is None or self._clock() >= self._held_until:
            self._release()
            self._connection = self._pool.get_connection()
            self._held_until = self._clock() + HELD_SECONDS
        try:
            self._connection.send_command("EVALSHA", script.sha, len(keys), *keys, *args)
        except BaseException:
            self.close()
            raise

    def has_reply(self, timeout: float) -> bool:
        """Wait `timeout` seconds at most, and return whether `receive` can read the reply, or will raise an error."""
        if self._connection is None:
            return True
        try:
            return bool(self._connection.can_read(timeout))
        except redis.ConnectionError:
            return True

    def receive(self, script: "Script", args: Sequence[str | int | bytes], keys: Sequence[str] = ()) -> Any:
        """Return the reply to the call that was sent with these arguments and keys.

        A call that a node of a Redis Cluster redirects is sent once more, so it must be one that may be repeated.
        """
        if self._connection is None:
            raise redis.ConnectionError("the connection was closed before the reply came")
        try:
            return self._connection.read_response()
        except NoScriptError:
            return script(keys=keys, args=args)  # this loads the script
        except RedirectedError:
            self.close()
            return script(keys=keys, args=args)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, so that the next call cannot read the reply to this one."""
        if self._connection is not None:
            self._connection.disconnect()
        self._release()

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.release(connection)
