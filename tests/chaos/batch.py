"""`python -m chaos.batch`: a batch over HTTP and one by `headrace batch run`, while everything about them dies.

Exit status 1 where a line of an input has not exactly one answer, or another answer than the other way gave.
"""

import argparse
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import openai

from chaos import faults
from chaos.model import save_chaos_model
from chaos.pooling import save_pooling_model
from chaos.site import Site
from engine.pooling.tiny_pooling_models import words
from service.gateway.batch_process import HEADRACE, read_lines, write_input
from service.gateway.gateway_process import GatewayProcess

END_SECONDS: Final = 3600.0
_SILENCE_SECONDS: Final = 300.0
"""Without a new answer for so long, a run is given up."""
_ERRORS_EVERY: Final = 40
_CLAIM_SECONDS: Final = 10.0
_WINDOW: Final = 16


@dataclass
class Account:
    """What became of one batch."""

    way: str
    lines: int
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    answers: int = 0
    errors: int = 0
    missing: int = 0
    twice: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Workload:
    """The lines of a batch.

    Attributes:
        answer: key of an answer's body that does not differ from run to run.
    """

    url: Any
    save_model: Callable[[Path], str]
    bodies: Callable[[int], Iterable[dict[str, Any]]]
    answer: str


class Runner:
    """One way to run a batch, to be disturbed."""

    def __init__(self, site: Site, source: Path, url: Any) -> None:
        self.site = site
        self.source = source
        self.url = url

    def begin(self) -> None: ...

    def num_done(self) -> int: ...

    def has_ended(self) -> bool: ...

    def answers(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]: ...

    def faults(self) -> list[Callable[[random.Random], Any]]:
        """Those of workers and Redis."""
        site = self.site
        some = (faults.kill_worker, faults.kill_engine, faults.kill_all_workers, faults.restart_redis)
        more = (faults.kill_connections, faults.fill_disk)
        return [_named(fault.__name__, lambda draw, fault=fault: fault(site, draw)) for fault in (*some, *more)]


def _named(name: str, act: Callable[[random.Random], Any]) -> Callable[[random.Random], Any]:
    act.__name__ = name
    return act


class HttpRunner(Runner):
    """A batch of the gateways."""

    def begin(self) -> None:
        client = self._client(0)
        with self.source.open("rb") as file:
            uploaded = client.files.create(file=file, purpose="batch")
        made = client.batches.create(input_file_id=uploaded.id, endpoint=self.url, completion_window="24h")
        self._id = made.id
        self._last = made

    def _client(self, replica: int) -> openai.OpenAI:
        url = f"{self.site.gateways[replica].url}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    def _look(self) -> None:
        for replica in range(len(self.site.gateways)):
            with suppress(openai.OpenAIError):
                self._last = self._client(replica).batches.retrieve(self._id)
                return

    def num_done(self) -> int:
        self._look()
        counts = self._last.request_counts
        return 0 if counts is None else counts.completed + counts.failed

    def has_ended(self) -> bool:
        self._look()
        return self._last.status in ("completed", "failed", "expired", "cancelled")

    def answers(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        assert self._last.status == "completed", self._last
        output, errors = (
            [json.loads(line) for line in self._client(0).files.content(name).text.splitlines()] if name else []
            for name in (self._last.output_file_id, self._last.error_file_id)
        )
        return output, errors

    def faults(self) -> list[Callable[[random.Random], Any]]:
        return [*super().faults(), self.kill_gateways, self.freeze_gateway, self.fill_output_disk]

    def kill_gateways(self, draw: random.Random) -> None:
        """kill -9 of one gateway after the other."""
        faults.kill_gateway(self.site, draw)

    def freeze_gateway(self, draw: random.Random) -> None:
        """SIGSTOP for longer than a claim lives, so that the other one takes over, then SIGCONT."""
        gateway = draw.choice(self.site.gateways)
        gateway.process.send_signal(signal.SIGSTOP)
        time.sleep(_CLAIM_SECONDS + draw.uniform(1.0, 4.0))
        gateway.process.send_signal(signal.SIGCONT)

    def fill_output_disk(self, draw: random.Random) -> None:
        """No file of a gateway may grow."""
        for gateway in self.site.gateways:
            _limit(gateway, 1)
        time.sleep(draw.uniform(1.0, 5.0))
        for gateway in self.site.gateways:
            _limit(gateway, resource.RLIM_INFINITY)


def _limit(gateway: GatewayProcess, size: int) -> None:
    resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class CommandRunner(Runner):
    """`headrace batch run`, started again whenever it has ended too early."""

    def begin(self) -> None:
        self._output, self._errors = self.source.with_name("out.jsonl"), self.source.with_name("out.errors.jsonl")
        self._start()

    def _start(self) -> None:
        command = [
            *HEADRACE,
            self.source,
            self._output,
            "--redis-url",
            self.site.url_of("gateway"),
            "--window",
            str(_WINDOW),
        ]
        with self.source.with_name("batch-run.log").open("ab") as told:
            self._process = subprocess.Popen(
                [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=told, stderr=told
            )

    def num_done(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in (self._output, self._errors) if path.exists())

    def has_ended(self) -> bool:
        code = self._process.poll()
        if code not in (None, 0, 3):
            self._start()
        return code in (0, 3)

    def answers(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return read_lines(self._output), read_lines(self._errors)

    def faults(self) -> list[Callable[[random.Random], Any]]:
        return [*super().faults(), self.kill_command, self.fill_output_disk]

    def kill_command(self, _draw: random.Random) -> None:
        """kill -9; the same command continues."""
        self._process.kill()
        self._process.wait()
        self._start()

    def fill_output_disk(self, draw: random.Random) -> None:
        """Neither file of it may grow: the command ends, and is started again when there is room."""
        with suppress(ProcessLookupError):
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(draw.uniform(5.0, 10.0))
        self._process.kill()
        self._process.wait()
        self._start()


WAYS: Final[dict[str, type[Runner]]] = {"http": HttpRunner, "command": CommandRunner}


def completions(count: int) -> Iterable[dict[str, Any]]:
    """Greedy and seeded requests, and some that a worker refuses."""
    for number in range(count):
        if number % _ERRORS_EVERY == _ERRORS_EVERY - 1:
            yield {"model": "tiny", "prompt": "a " * 5000, "max_tokens": 4}
        else:
            yield {
                "model": "tiny",
                "prompt": f"line {number}",
                "max_tokens": 4 + number % 24,
                "temperature": number % 2,
                "seed": number,
                "ignore_eos": True,
            }


def embeddings(count: int) -> Iterable[dict[str, Any]]:
    """Lines of 1 to 10 texts, and some with a text that is too long."""
    draw, vocabulary = random.Random(5), words()
    for number in range(count):
        is_wrong = number % _ERRORS_EVERY == _ERRORS_EVERY - 1
        lengths = [5000] if is_wrong else [draw.randrange(1, 20) for _ in range(1 + number % 10)]
        texts = [" ".join(draw.choices(vocabulary, k=length)) for length in lengths]
        yield {"model": "tiny", "input": texts, "encoding_format": "base64"}


WORKLOADS: Final = {
    "completions": Workload("/v1/completions", save_chaos_model, completions, "choices"),
    "embeddings": Workload("/v1/embeddings", save_pooling_model, embeddings, "data"),
}


def run(
    way: str, work: Workload, site: Site, folder: Path, lines: int, seed: int, num_faults: int
) -> tuple[Account, dict[str, Any]]:
    """Run one batch, with a fault after each few answers; returns the answers by custom id, too."""
    folder.mkdir(parents=True, exist_ok=True)
    runner = WAYS[way](site, write_input(folder / "in.jsonl", work.bodies(lines), work.url), work.url)
    account, draw, began = Account(way, lines), random.Random(seed), time.monotonic()
    site.wait_ready()
    runner.begin()
    order: list[Callable[[random.Random], Any]] = []
    done, moved_at = 0, time.monotonic()
    step = lines / (num_faults + 1)
    next_fault = step
    while not runner.has_ended():
        site.revive()
        now = runner.num_done()
        if now != done:
            done, moved_at = now, time.monotonic()
        if time.monotonic() - moved_at > _SILENCE_SECONDS or time.monotonic() - began > END_SECONDS:
            account.problems.append(f"no answer came after {done} of {lines}")
            break
        if done >= next_fault:
            if not order:
                order = runner.faults()
                draw.shuffle(order)
            fault = order.pop()
            account.faults[fault.__name__] = account.faults.get(fault.__name__, 0) + 1
            fault(draw)
            next_fault = done + step
        time.sleep(0.05)
    account.seconds = round(time.monotonic() - began, 1)
    if account.problems:
        return account, {}
    site.wait_ready()
    return account, _check(account, work.answer, *runner.answers())


def _check(
    account: Account, answer_key: str, output: list[dict[str, Any]], errors: list[dict[str, Any]]
) -> dict[str, Any]:
    counts = Counter(answer["custom_id"] for answer in (*output, *errors))
    expected = {f"line-{number}" for number in range(account.lines)}
    account.answers, account.errors = len(output), len(errors)
    account.missing = len(expected - counts.keys())
    account.twice = sum(count - 1 for count in counts.values())
    if account.missing or account.twice or counts.keys() - expected:
        account.problems.append(f"{account.missing} lines have no answer, {account.twice} answers are one too many")
    wanted = account.lines // _ERRORS_EVERY
    if len(errors) != wanted:
        some = [error for error in errors if error["error"] or error["response"]["status_code"] != 400][:3]
        account.problems.append(f"{len(errors)} errors, not {wanted}: {some}")
    return {answer["custom_id"]: answer["response"]["body"][answer_key] for answer in output}


def both(
    folder: Path, work: Workload, lines: int, seed: int, num_faults: int, ways: Iterable[str] = tuple(WAYS)
) -> list[Account]:
    """Run the batch in each way; the answers must be the same."""
    settings = {"files": folder / "files", "batch_window": _WINDOW}
    logs = folder / "logs"
    logs.mkdir(parents=True)
    accounts, found = [], []
    with Site(work.save_model(folder / "tiny"), logs, gateway_settings=settings) as site:
        for way in ways:
            account, answers = run(way, work, site, folder / way, lines, seed, num_faults)
            accounts.append(account)
            found.append(answers)
    if len(found) > 1 and not any(account.problems for account in accounts):
        others = [custom_id for custom_id, answer in found[0].items() if found[1].get(custom_id) != answer]
        if others:
            accounts[1].problems.append(f"{len(others)} answers are other than over HTTP, such as {others[0]}")
    return accounts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.batch", description=__doc__)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="completions")
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=30, help="at most so many a batch")
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=list(WAYS))
    parser.add_argument("--json", metavar="FILE", help="write the accounts there")
    parser.add_argument("--logs", metavar="FOLDER", help="keep logs and files there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, work = Path(options.logs or temporary), WORKLOADS[options.workload]
        accounts = both(folder, work, options.lines, options.seed, options.faults, options.ways)
    for account in accounts:
        sys.stdout.write(json.dumps(asdict(account)) + "\n")
    if options.json:
        text = json.dumps(
            {"workload": options.workload, "seed": options.seed, "batches": [asdict(each) for each in accounts]},
            indent=1,
        )
        Path(options.json).write_text(text)
    return 1 if any(account.problems for account in accounts) else 0


if __name__ == "__main__":
    sys.exit(main())
