"""`Proxy`: a network between a worker and its server that can be cut, in two ways that feel different to the worker."""

import contextlib
import select
import socket
import threading
from typing import Final

_READ_SIZE: Final = 1 << 16
_POLL_SECONDS: Final = 0.05


class Proxy:
    """Forwards connections from a free loopback port to `target_port`.

    `stall` loses no connection, but nothing arrives any more, as behind a dead switch; `refuse` resets every
    connection and takes no new one, as from a firewall; `heal` ends either, and what was stalled arrives late.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: Final[int] = self._listener.getsockname()[1]
        self._flows = threading.Event()
        self._flows.set()
        self._refuses = False
        self._closed = False
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        threading.Thread(target=self._accept, name=f"proxy-{self.port}", daemon=True).start()

    def stall(self) -> None:
        self._flows.clear()

    def refuse(self) -> None:
        self._refuses = True
        self._reset_all()

    def heal(self) -> None:
        self._refuses = False
        self._flows.set()

    def close(self) -> None:
        self._closed = True
        self._flows.set()
        self._listener.close()
        self._reset_all()

    def _reset_all(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                if self._refuses:
                    raise ConnectionRefusedError
                far = socket.create_connection(("127.0.0.1", self._target_port), timeout=1)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._pairs.add((near, far))
            threading.Thread(target=self._forward, args=(near, far), daemon=True).start()

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        """Both directions of one connection, until either end is gone."""
        other = {near: far, far: near}
        with near, far, contextlib.suppress(OSError):
            while not self._closed:
                for end in select.select([near, far], [], [], _POLL_SECONDS)[0]:
                    data = end.recv(_READ_SIZE)
                    self._flows.wait()
                    if not data:
                        return
                    other[end].sendall(data)
        with self._lock:
            self._pairs.discard((near, far))
