"""Free ports of loopback."""

import contextlib
import random
import socket
from typing import Final

# Below those that the kernel gives to connections and to servers that ask for any, which it may do before this one is
# used. pytest-randomly gives every process of a run the same seed, hence the system's numbers.
_PORTS: Final = range(10_000, 32_000)
_DRAW: Final = random.SystemRandom()


def free_port() -> int:
    """Free now, and nobody else's for as long as one cannot but hope."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", _DRAW.choice(_PORTS)))
            return int(probe.getsockname()[1])
