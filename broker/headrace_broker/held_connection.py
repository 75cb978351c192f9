"""`HeldConnection`: a connection that one caller keeps for a while, to run a script at every step of an engine.

To take one from redis-py's pool for each call, and to give it back, costs more than what the call itself does.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoScriptError

if TYPE_CHECKING:
    import redis
    from redis.commands.core import Script

HELD_SECONDS: Final = 1.0
"""So long it is kept. The pool then looks whether the server has closed it meanwhile; until then a call finds out, and
fails, where the pool would have reconnected unseen."""


class HeldConnection:
    """Of a client's pool; used by one thread only. After an error the next call takes another one."""

    def __init__(self, client: "redis.Redis", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool: Final = client.connection_pool
        self._clock: Final = clock
        self._connection: Any = None
        self._held_until = 0.0

    def run(self, script: "Script", args: Sequence[str | int | bytes]) -> Any:
        """The script's reply; it is called without keys. Redis's errors pass through, and nothing is tried again."""
        if self._connection is None or self._clock() >= self._held_until:
            self._exchange()
        try:
            self._connection.send_command("EVALSHA", script.sha, 0, *args)
            return self._connection.read_response()
        except NoScriptError:
            return script(args=args)  # which loads it
        except BaseException:
            self._connection.disconnect()  # a reply may still come, which would be taken for the next call's
            self._release()
            raise

    def _exchange(self) -> None:
        self._release()
        self._connection = self._pool.get_connection()
        self._held_until = self._clock() + HELD_SECONDS

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.release(connection)
