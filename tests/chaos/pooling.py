"""`python -m chaos.pooling`: rounds of random faults while jobs of many texts are embedded, with a table.

A round sends jobs, waits until rows flow, breaks something, and waits for the end of each job. Each row must be there
once, in its place and with the bytes of an undisturbed run; a resumed job may not compute finished inputs again.
Exit status 1 where anything of this was broken.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import celery.exceptions
import redis
from celery.result import AsyncResult
from rich.console import Console
from rich.table import Table

from chaos import faults
from chaos.faults import Fault
from chaos.harness import END_SECONDS, SETTLE_SECONDS, result_of
from chaos.recorder import Computed, Record, RowsLog, finished_again
from chaos.site import Site
from chaos.watcher import Watcher
from engine.pooling.tiny_pooling_models import NORMALIZE, add_modules, build, pooling, words
from service.servers import PROGRAM
from service.workers.service import QUEUE

FAULTS: Final[tuple[Fault, ...]] = (
    faults.kill_worker,
    faults.kill_engine,
    faults.freeze_worker,
    faults.restart_redis,
    faults.kill_all_workers,
    faults.freeze_worker_and_engine,
    faults.drain_worker,
    faults.kill_connections,
    faults.stall_network,
    faults.refuse_network,
    faults.fill_disk,
)
JOBS_A_ROUND: Final = 8
_KINDS: Final = 24
_STEP_TOKENS: Final = 128
_RIGHT: Final = (AssertionError, redis.RedisError, TimeoutError, celery.exceptions.TimeoutError)


@dataclass
class PoolingRound:
    """One round's account; `problems` holds a sentence for each broken promise."""

    number: int
    fault: str
    jobs: int = 0
    rows: int = 0
    resumed: int = 0
    """Jobs that more than one attempt worked on."""
    lost: int = 0
    """Rows that are missing."""
    wrong: int = 0
    """Rows that came twice, are out of place, or have other bytes than undisturbed."""
    computed: int = 0
    """Inputs that engines computed. Those of a step that was not finished are computed again."""
    finished_again: int = 0
    """Inputs that were computed again although their rows were finished."""
    problems: list[str] = field(default_factory=list)


def save_pooling_model(folder: Path) -> str:
    """Save a random BERT that embeds."""
    build(folder, "bert")
    add_modules(folder, [pooling(), NORMALIZE])
    return str(folder)


def jobs() -> list[dict[str, Any]]:
    """The arguments of jobs of 20 to 300 texts or lists of ids: short, long, cut, not normalised, with a prompt."""
    draw, vocabulary = random.Random(7), words()
    options: list[dict[str, Any]] = [{}, {"truncate": "end"}, {"normalize": False}, {"prompt": "query a "}]
    found = []
    for number in range(_KINDS):
        chosen = options[number % len(options)]
        longest = 90 if "truncate" in chosen else 20
        lengths = [draw.randrange(1, longest) for _ in range(draw.randrange(20, 300))]
        texts = [" ".join(draw.choices(vocabulary, k=length)) for length in lengths]
        ids = [[draw.randrange(10, 100) for _ in range(length)] for length in lengths]
        found.append({"input": ids if number % 3 == 2 and chosen == {} else texts, **chosen})
    return found


class PoolingHarness:
    """Args:
    seed: of the choice of jobs, faults, victims and times; the machine adds its own.
    """

    def __init__(self, site: Site, record: Record, seed: int) -> None:
        self._site = site
        self._record = record
        self._draw = random.Random(seed)
        self._jobs = jobs()
        self._expected: list[bytes] = []

    def learn(self) -> None:
        """Run every kind of job undisturbed."""
        self._site.wait_ready()
        handles = [self._send(job) for job in self._jobs]
        for handle, job in zip(handles, self._jobs, strict=True):
            result = result_of(handle)
            assert result["error"] is None, result["error"]
            assert result["data"]["shape"][0] == len(job["input"])
            self._expected.append(result["data"]["bytes"])
        self._site.service.wait_settled(SETTLE_SECONDS)
        self._site.forget(handles)
        computed = sum(map(len, self._record.take().values()))
        assert computed == sum(len(job["input"]) for job in self._jobs), "an undisturbed run computes each input once"

    def _send(self, job: dict[str, Any]) -> AsyncResult:
        return self._site.service.app.send_task("headrace.embed", kwargs=job, queue=QUEUE)

    def run(
        self, rounds: int, report: Callable[[PoolingRound], None], chosen: Sequence[Fault] = FAULTS
    ) -> list[PoolingRound]:
        done = []
        for number, fault in enumerate(faults.in_random_order(chosen, rounds, self._draw), 1):
            done.append(self._round(number, fault))
            report(done[-1])
        return done

    def _round(self, number: int, fault: Fault) -> PoolingRound:
        account = PoolingRound(number, fault.__name__, jobs=JOBS_A_ROUND)
        self._site.wait_ready()
        kinds = [self._draw.randrange(len(self._jobs)) for _ in range(JOBS_A_ROUND)]
        handles = [self._send(self._jobs[kind]) for kind in kinds]
        watcher = Watcher(
            lambda request_id: self._site.url_of_stream(request_id, "subscriber"), [h.id for h in handles]
        )
        some = self._draw.randrange(1, sum(len(self._jobs[kind]["input"]) for kind in kinds) // 2)
        try:
            self._wait(lambda: sum(watcher.num_tokens(handle.id) for handle in handles) >= some, 30.0)
            try:
                fault(self._site, self._draw)
            except AssertionError as error:  # a process did not come back; the other rounds still run
                account.problems.append(f"the fault was not overcome: {error}"[:400])
            self._wait(lambda: len(watcher.ended) == len(handles), END_SECONDS)
        finally:
            watcher.stop()
        self._check_settled(account)
        computed = self._record.take()
        for handle, kind in zip(handles, kinds, strict=True):
            arrivals = watcher.arrivals[handle.id]
            self._check(account, handle, kind, computed.get(handle.id, []), arrivals)
        self._site.forget(handles)
        return account

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self._site.revive()
            time.sleep(0.01)

    def _check(
        self,
        account: PoolingRound,
        handle: AsyncResult,
        kind: int,
        computed: Sequence[Computed],
        arrivals: Sequence[float],
    ) -> None:
        expected, count = self._expected[kind], len(self._jobs[kind]["input"])
        account.rows += count
        account.computed += len(computed)
        try:
            log = RowsLog.read(self._site.client, handle.id)
            account.resumed += len(log.begun) > 1
            size = len(expected) // count
            account.lost += max(0, count - log.num_rows)
            wrong = [
                row for row in range(0, len(log.data), size) if log.data[row : row + size] != expected[row : row + size]
            ]
            account.wrong += len(wrong)
            assert not wrong, f"{len(wrong)} of {count} rows have other bytes, the first is {wrong[0] // size}"
            assert log.num_rows == count, f"{log.num_rows} of {count} rows"
            assert log.end is not None, "it did not end"
            assert log.end["error"] is None, f"ended with {log.end['error']}"
            result = result_of(handle)
            assert result["error"] is None
            assert result["data"]["bytes"] == log.data, "the result is not the stream"
            assert result["usage"] == log.end["usage"]
            again = finished_again(computed, log, arrivals)
            account.finished_again += again
            assert not again, f"{again} finished inputs were computed again"
        except _RIGHT as error:
            account.problems.append(f"job {handle.id} of kind {kind}: {type(error).__name__} {error}"[:400])

    def _check_settled(self, account: PoolingRound) -> None:
        """No message queued or leased, no dead letter, no command refused, no worker that gave up."""
        try:
            self._site.service.wait_settled(SETTLE_SECONDS)
        except AssertionError as error:
            account.problems.append(f"messages are left over: {error}"[:400])
        account.problems += [f"a dead letter: {letter[b'reason']}" for letter in self._site.service.dead_letters()]
        self._site.client.delete(f"headrace:dead:{QUEUE}")
        account.problems += self._site.take_refusals()
        account.problems += [f"a worker ended by itself, see {log}" for log in self._site.take_ended()]


def summary(rounds: Sequence[PoolingRound]) -> list[dict[str, Any]]:
    """A line for each fault, and one for all."""
    names = [fault.__name__ for fault in FAULTS if any(done.fault == fault.__name__ for done in rounds)]
    lines = [_line(name, [done for done in rounds if done.fault == name]) for name in names]
    return [*lines, _line("all", rounds)]


def _line(name: str, rounds: Sequence[PoolingRound]) -> dict[str, Any]:
    counted = ("jobs", "rows", "resumed", "lost", "wrong", "computed", "finished_again")
    sums = {key: sum(getattr(done, key) for done in rounds) for key in counted}
    return {"fault": name, "rounds": len(rounds), **sums, "problems": sum(len(done.problems) for done in rounds)}


def pooling_site(folder: Path, logs: Path, program: str = PROGRAM) -> tuple[Site, Record]:
    """Start the service, whose workers have a tiny model that embeds."""
    record = Record(folder / "record")
    settings = {"max_num_batched_tokens": _STEP_TOKENS}
    model = save_pooling_model(folder / "tiny")
    site = Site(model, logs, engine_settings=settings, program=program, environ=record.environ, num_gateways=0)
    return site, record


def main() -> int:
    names = {fault.__name__: fault for fault in FAULTS}
    parser = argparse.ArgumentParser(prog="python -m chaos.pooling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=sorted(names), help="only these [default: all]")
    parser.add_argument("--json", metavar="FILE", help="write every round and the summary there")
    parser.add_argument("--server", metavar="PROGRAM", default=PROGRAM, help="[default: %(default)s]")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the workers' logs there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service's processes are ended on the way out
    console = Console(stderr=True)

    def report(done: PoolingRound) -> None:
        console.print(f"{done.number} of {options.rounds} rounds, {done.fault}")
        for problem in done.problems:
            console.print(f"round {done.number}, {done.fault}: {problem}", style="red", markup=False)

    with tempfile.TemporaryDirectory() as temporary:
        logs = Path(options.logs or temporary) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        site, record = pooling_site(Path(temporary), logs, options.server)
        with site:
            harness = PoolingHarness(site, record, options.seed)
            harness.learn()
            chosen = [names[name] for name in options.faults] if options.faults else FAULTS
            rounds = harness.run(options.rounds, report, chosen)
    lines = summary(rounds)
    table = Table(*(name.replace("_", " ") for name in lines[0]), title=f"embedding jobs, seed {options.seed}")
    for line in lines:
        table.add_row(*map(str, line.values()))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if options.json:
        text = json.dumps({"summary": lines, "rounds": [asdict(done) for done in rounds]}, indent=1)
        Path(options.json).write_text(text)
    return 1 if lines[-1]["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
