"""Which source files of Headrace one request visits: a stock Celery request, and a chat over HTTP.

    python benchmarks/request_path.py [--json FILE]

Starts a Redis server, a worker and a gateway, sends some requests to warm up, and then one request of eight tokens of
each kind. Prints for each process the files of Headrace that ran, and how often each was entered from another file. A
file is entered by a call, or when a coroutine or generator resumes. Periodic work during the request is counted too.
"""

import argparse
import json
import mmap
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from celery import Celery
from rich.console import Console
from rich.table import Table

import runs
from headrace_broker.server.embedded import EmbeddedServer
from headrace_cli.local.process import LocalGateway, LocalWorker
from headrace_engine.checkpoints import default_model

_ROOT: Final = Path(__file__).parents[1]
_WARM_UP: Final = 3
_PROMPT: Final = "One, two,"
_TOKENS: Final = 8
_SHOWN: Final = 12
# Python imports this module at the start of each process whose PYTHONPATH has its folder.
_TRACER: Final = """
import json, mmap, os, sys, threading, time
from collections import Counter

folder, root = os.environ["REQUEST_PATH"], os.environ["REQUEST_PATH_ROOT"]
with open(os.path.join(folder, "phase"), "r+b") as file:
    phase = mmap.mmap(file.fileno(), 1)
names, entered = {}, Counter()


def name_of(path):
    if path not in names:
        parts = path[len(root) + 1:].split(os.sep) if path.startswith(root + os.sep) else []
        is_ours = len(parts) > 1 and parts[1].startswith("headrace_")
        names[path] = os.sep.join(parts[1:]) if is_ours else None
    return names[path]


def called(frame, event, _argument):
    if event != "call" or phase[0] % 2 == 0:
        return
    name = name_of(frame.f_code.co_filename)
    if name is None or frame.f_code.co_name == "<module>":
        return
    caller = frame.f_back
    while caller is not None and (before := name_of(caller.f_code.co_filename)) is None:
        caller = caller.f_back
    if caller is None or before != name:
        entered[name] += 1


def report():
    done = 0
    while True:
        time.sleep(0.02)
        if phase[0] != done:
            done = phase[0]
            if done % 2 == 0 and done:
                path = os.path.join(folder, f"{done}-{os.getpid()}")
                with open(path + ".new", "w") as file:
                    json.dump([sys.orig_argv[1:], dict(entered)], file)
                os.rename(path + ".new", path)
                entered.clear()


threading.Thread(target=report, daemon=True).start()
threading.setprofile(called)
sys.setprofile(called)
"""


class Tracer:
    """Counts how often files of Headrace are entered, in all processes that are started with this environment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "sitecustomize.py").write_text(_TRACER)
        (folder / "phase").write_bytes(b"\0")
        with (folder / "phase").open("r+b") as file:
            self._phase = mmap.mmap(file.fileno(), 1)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "REQUEST_PATH": str(folder),
            "REQUEST_PATH_ROOT": str(_ROOT),
        }

    def during(self, request: Callable[[], object]) -> dict[str, dict[str, int]]:
        """Return how often each file was entered during a request, by process."""
        self._phase[0] += 1
        request()
        time.sleep(0.3)  # the acknowledgement follows the result
        self._phase[0] += 1
        time.sleep(1.0)  # each process writes its counts
        found: dict[str, dict[str, int]] = {}
        for path in self._folder.glob(f"{self._phase[0]}-*[0-9]"):
            argv, entered = json.loads(path.read_text())
            if entered:
                found[_role(argv)] = dict(sorted(entered.items(), key=lambda item: -item[1]))
        return found


def _role(argv: list[str]) -> str:
    if "headrace_engine.core.child" in argv:
        return "engine"
    if any("headrace_workers.preparation" in argument for argument in argv):
        return "quick process" if "quick" in argv else "slow process"
    return argv[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    figures = _measure(str(default_model.fetch("bfloat16")))
    for kind, processes in figures.items():
        _report(kind, processes)
    if args.json:
        runs.save(args.json, **figures)


def _measure(model: str) -> dict[str, dict[str, dict[str, int]]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tracer = Tracer(folder)
        url = stack.enter_context(EmbeddedServer()).url
        worker = LocalWorker(model=model, redis_url=url, log=folder / "worker.log", served_model_name="m")
        stack.enter_context(worker).wait_ready()
        gateway = stack.enter_context(LocalGateway(redis_url=url, log=folder / "gateway.log"))
        gateway.wait_ready()
        app = Celery(broker=url, backend=url)

        def through_celery() -> object:
            params = {"max_tokens": _TOKENS, "temperature": 0.0}
            kwargs = {"prompt": _PROMPT, "sampling_params": params}
            return app.send_task("headrace.generate", kwargs=kwargs, queue="headrace.m").get(timeout=60)

        def through_http() -> object:
            messages = [{"role": "user", "content": _PROMPT}]
            body: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": _TOKENS, "temperature": 0.0}
            request = urllib.request.Request(  # our own address
                f"{gateway.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.read()

        found = {}
        for kind, send in (("a plain Celery request", through_celery), ("a chat over HTTP", through_http)):
            for _ in range(_WARM_UP):
                send()
            found[kind] = tracer.during(send)
        return found


def _report(kind: str, processes: dict[str, dict[str, int]]) -> None:
    files = {file for entered in processes.values() for file in entered}
    often = sum(count > 3 for entered in processes.values() for count in entered.values())
    table = Table(title=f"{kind}: {len(files)} files, {often} entered more than three times", title_justify="left")
    for column in ("process", "files", "most often entered"):
        table.add_column(column)
    for process, entered in sorted(processes.items()):
        shown = ", ".join(f"{file.removesuffix('.py')} {count}" for file, count in list(entered.items())[:_SHOWN])
        table.add_row(process, str(len(entered)), shown)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
