"""Free ports of loopback."""

import socket


def free_port() -> int:
    """Free now, and nobody else's for as long as one cannot but hope."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
