"""`HeldConnection`: a connection that one caller keeps for a while, to run a script at every step of an engine.

Taking a connection from redis-py's pool for each call and returning it costs more than the call itself.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import redis
from redis.commands.core import Script
from redis.exceptions import NoScriptError

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

    def run(self, script: "Script", args: Sequence[str | int | bytes]) -> Any:
        """Run the script without keys and return its reply. Redis's errors pass through; nothing is retried."""
        if self._connection is None or self._clock() >= self._held_until:
            self._release()
            self._connection = self._pool.get_connection()
            self._held_until = self._clock() + HELD_SECONDS
        try:
            self._connection.send_command("EVALSHA", script.sha, 0, *args)
            return self._connection.read_response()
        except NoScriptError:
            return script(args=args)  # this loads the script
        except BaseException:
            self._connection.disconnect()  # or the next call could read the reply to this one
            self._release()
            raise

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.release(connection)
