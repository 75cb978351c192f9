"""`LocalGateway`: a real gateway process on this machine, for `headrace serve` and the benchmarks."""

from pathlib import Path

from headrace_broker.embedded import free_port
from headrace_workers.local_process import LocalProcess


class LocalGateway(LocalProcess):
    """Run one `headrace gateway` for the length of a `with` block.

    Args:
        log: file for its output.
        host, port: the address on which it listens; port 0 takes a free one.
        settings: the gateway's other settings, by name.
    """

    def __init__(
        self, *, redis_url: str, log: Path, host: str = "127.0.0.1", port: int = 0, **settings: object
    ) -> None:
        self.host = host
        self.port = port or free_port()
        given = {"host": host, "port": self.port, **settings}
        environ = {f"HEADRACE_GATEWAY_{name.upper()}": str(value) for name, value in given.items()}
        environ["HEADRACE_REDIS_URL"] = redis_url
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
        url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        super().__init__("gateway", log=log, environ=environ, url=url, ready="/ready")
