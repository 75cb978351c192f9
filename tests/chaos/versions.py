"""`make chaos-versions`: the faults of `make chaos` on a service of which one half runs an earlier version.

Each round has a worker, a gateway and a client of either version. In some rounds all of them exchange their versions
one by one, which is an upgrade and a return to the earlier version at once. Exit status 1 as of `make chaos`, where a
pair of versions never met, and where their exporters count a queue differently.

Versions before the number of the wire format have other keys for what is sorted and leased (docs/upgrade.md). Their
workers do not see what a new worker has sorted, and neither do their exporters, so neither is asked of them.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self
from urllib.request import urlopen

from celery.result import AsyncResult
from rich.console import Console
from rich.table import Table

from chaos.client_process import ClientProcess
from chaos.faults import FAULTS, Fault
from chaos.harness import END_SECONDS, Harness, Round, summary
from chaos.load import Kind
from chaos.model import save_chaos_model
from chaos.site import Site
from headrace_broker.server.embedded import die_with_parent, free_port
from service.earlier_code import EarlierCode, extract
from service.workers.service import StreamLog

EARLIER, NEW = "earlier", "new"
_EXPORTER_SECONDS: Final = 60.0
_WAITING: Final = 3
"""Messages in the queue while the exporters are compared."""
Meeting = tuple[str, str, str]
"""The versions of a request's client, of the worker that began it and of the one that ended it."""


class MixedSite(Site):
    """A site of which every second process runs the earlier version.

    Args:
        earlier: the folder with its code.
    """

    has_ledger = False  # the earlier workers may be older than it

    def __init__(self, model: str, folder: Path, earlier: Path) -> None:
        self._earlier: Final = EarlierCode(earlier)
        self.has_shared_keys = (earlier / "wire/headrace_wire/wire_number.py").exists()
        self._senders: dict[str, str] = {}
        self.meetings: Counter[Meeting] = Counter()
        super().__init__(model, folder)
        self._clients = {
            EARLIER: ClientProcess(self.url_of("client"), self._earlier.added_to(os.environ)),
            NEW: ClientProcess(self.url_of("client"), os.environ),
        }
        self._versions = itertools.cycle(self._clients)

    def with_code(self, number: int, environ: Mapping[str, str]) -> dict[str, str]:
        return self._earlier.added_to(environ) if number % 2 else dict(environ)

    def send(self, kind: Kind, *, priority: int, **_: Any) -> AsyncResult:
        request_id, version = uuid.uuid4().hex, next(self._versions)
        self._senders[request_id] = version
        self._clients[version].submit(request_id, **kind.body, priority=priority)
        return self.service.handle(request_id)

    def check(self, request_id: str, log: StreamLog) -> None:
        """Compare what the request's client has read, and count which versions met."""
        version = self._senders.pop(request_id)
        read = self._clients[version].read(request_id, END_SECONDS)
        assert read == {index: choice.token_ids for index, choice in log.content.items() if choice.token_ids}
        first, last = (self._version_of(log.workers[index]) for index in (0, -1))
        self.meetings[version, first, last] += 1

    def other_code(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with the code of the other version."""
        if self._earlier.is_in(environ):
            return self._earlier.removed_from(environ)
        return self._earlier.added_to(environ)

    def queue_as_exported(self) -> list[str]:
        """End the workers, and return what an exporter of either version says of messages that wait.

        Without shared keys, dead letters are left out: an earlier worker's are not moved yet.
        """
        for post in self.posts:
            post.worker.kill()
        for number in range(_WAITING):
            self.service.send({"prompt": "x"}, priority=3 * number, headers={"tenant": f"t{number % 2}"})
        found = []
        for environ in (self._earlier.added_to(os.environ), dict(os.environ)):
            with Exporter({**environ, "HEADRACE_REDIS_URL": self.url_of("exporter")}) as exporter:
                lines = exporter.lines_of("headrace_queue_messages{")
                compared = [line for line in lines if self.has_shared_keys or 'state="dead"' not in line]
                found.append("\n".join(sorted(compared)))
        return found

    def _version_of(self, worker: str) -> str:
        for post in self.posts:
            for pid, environ in post.started.items():
                if f"-{pid}@" in worker:
                    return EARLIER if self._earlier.is_in(environ) else NEW
        raise AssertionError(f"no worker of the site is named {worker}")

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        super().close()


class Exporter:
    """A context manager that runs `headrace exporter`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._port: Final = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from headrace_cli.main import main; main()", "exporter"],
            env={**environ, "HEADRACE_EXPORTER_PORT": str(self._port)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )

    def lines_of(self, start: str) -> list[str]:
        """Wait until there are lines that begin so, and return them."""
        deadline = time.monotonic() + _EXPORTER_SECONDS
        while True:
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10) as answer:
                if lines := [line for line in answer.read().decode().splitlines() if line.startswith(start)]:
                    return lines
            assert self._process.poll() is None, "the exporter ended"
            assert time.monotonic() < deadline, f"the exporter has nothing that begins with {start}"
            time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def exchange_versions(site: Site, draw: random.Random) -> float:
    """Each worker and each gateway is stopped and replaced by one of the other version, one after the other."""
    assert isinstance(site, MixedSite)
    begun = time.monotonic()
    for post in site.posts:
        post.worker.send_signal(signal.SIGTERM)
        post.worker.wait()
        post.environ = site.other_code(post.environ)
        post.start()
        while not post.is_ready:
            assert post.worker.process.poll() is None, post.worker.log_text()
            time.sleep(0.02)
    for gateway in site.gateways:
        gateway.close()
        gateway.environ = site.other_code(gateway.environ)
        gateway.start()
        gateway.wait_ready()
    return time.monotonic() - begun


FAULTS_OF_VERSIONS: Final[Sequence[Fault]] = (*FAULTS, exchange_versions)


def problems_of_meetings(meetings: Mapping[Meeting, int], *, has_shared_keys: bool = True) -> list[str]:
    """Say which versions never met: a client and a worker, or two workers of one request.

    Without shared keys, an earlier worker cannot end what a new one has begun.
    """
    served = {(client, first) for client, first, _ in meetings}
    resumed = {(first, last) for _, first, last in meetings}
    pairs = list(itertools.product((EARLIER, NEW), repeat=2))
    problems = [
        f"no {worker} worker began a request of the {client} client"
        for client, worker in pairs
        if (client, worker) not in served
    ]
    for first, last in pairs:
        if first != last and (first, last) not in resumed and (has_shared_keys or last == NEW):
            problems.append(f"no {last} worker ended what the {first} one had begun")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.versions", description=__doc__)
    parser.add_argument("--beside", required=True, metavar="COMMIT", help="tag or commit of the earlier version")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round and the summary there")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the workers' logs there")
    options = parser.parse_args()
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service's processes are ended on the way out
    with tempfile.TemporaryDirectory() as temporary:
        earlier = Path(temporary) / "earlier"
        if not extract(options.beside, earlier):
            parser.error(f"the history of git has no commit {options.beside}")
        logs = Path(options.logs or temporary) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with MixedSite(save_chaos_model(Path(temporary) / "tiny"), logs, earlier) as site:
            harness = Harness(site, options.seed)
            harness.learn()

            def report(done: Round) -> None:
                console.print(f"round {done.number} of {options.rounds}, {done.fault}", markup=False)
                for problem in done.problems:
                    console.print(problem, style="red", markup=False)

            rounds = harness.run(options.rounds, report, FAULTS_OF_VERSIONS)
            exported = site.queue_as_exported()
    problems = problems_of_meetings(site.meetings, has_shared_keys=site.has_shared_keys)
    if site.has_shared_keys and exported[0] != exported[1]:
        problems.append(f"the exporters disagree: {exported}")
    lines = summary(rounds)
    print_tables(lines, site.meetings, options.beside)
    for problem in problems:
        console.print(problem, style="red", markup=False)
    if options.json:
        found = {"beside": options.beside, "summary": lines, "rounds": [asdict(each) for each in rounds]}
        meetings = [[*meeting, count] for meeting, count in sorted(site.meetings.items())]
        options.json.write_text(json.dumps({**found, "meetings": meetings, "problems": problems}, indent=1))
    return 1 if problems or lines[-1]["problems"] else 0


def print_tables(lines: list[dict[str, Any]], meetings: Mapping[Meeting, int], beside: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    faults = Table(*(name.replace("_", " ") for name in lines[0]), title=f"beside {beside}")
    for line in lines:
        faults.add_row(*("" if value is None else str(value) for value in line.values()))
    console.print(faults)
    versions = Table("client", "begun by", "ended by", "requests")
    for meeting, count in sorted(meetings.items()):
        versions.add_row(*meeting, str(count))
    console.print(versions)


if __name__ == "__main__":
    sys.exit(main())
