"""`LocalWorker`: a real worker process on this machine, for `headrace serve`, the demo and the benchmarks."""

import json
from pathlib import Path
from urllib.error import HTTPError

from headrace_broker.embedded import free_port
from headrace_workers.local_process import LocalProcess


class LocalWorker(LocalProcess):
    """Run one `headrace worker` for the length of a `with` block, then drain it.

    Args:
        log: file for its output.
        port: port of metrics and health; 0 takes a free one.
        settings: the worker's other settings, by name.
    """

    def __init__(self, *, model: str, redis_url: str, log: Path, port: int = 0, **settings: object) -> None:
        port = port or free_port()
        environ = {
            "HEADRACE_MODEL": model,
            "HEADRACE_REDIS_URL": redis_url,
            "HEADRACE_METRICS_PORT": str(port),
            **{f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()},
        }
        super().__init__("worker", log=log, environ=environ, url=f"http://127.0.0.1:{port}", ready="/health/ready")

    def _reason(self, error: HTTPError) -> str:
        return str(json.loads(error.read()).get("reason"))
