"""`make fleet-affinity`: how many turns of conversations find their prompt cached, and how long requests wait for it.

Real workers whose engines sleep. A turn is a hit if its worker has served an earlier turn of the conversation: its
prompt then has cached tokens. A request waits until a worker has claimed it.
"""

import argparse
import threading
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from fleet.workers import SleepingService, Spent, sleeping_service
from headrace_broker import Client
from headrace_broker.streams.events import EndEvent, StartEvent
from headrace_cli.demo.stream_timing import percentile

SLOTS = 16
_STEP_SECONDS = 0.2
_OUTPUTS = 20
_FIRST_PROMPT, _NEXT_PROMPT = 200, 40
_THINK_SECONDS = 5.0
_OTHERS_SHARE = 0.3
"""Share of the requests that another tenant sends, which has no conversations."""
_TIMEOUT = 300.0


@dataclass
class Run:
    """What a run has measured. Times are in milliseconds."""

    hits: int = 0
    follow_ups: int = 0
    waits: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    """Waits of the tenant without conversations."""
    scripts: int = 0
    cpu_seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fleet.conversations", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--load", type=float, default=0.7, help="as a share of what the workers serve")
    parser.add_argument("--graces", type=float, nargs="+", default=[0.0, 0.05], help="values of --prefix-grace")
    options = parser.parse_args()
    table = Table(
        "--prefix-grace", "turns that hit, %", "wait p50, ms", "p99, ms", "another tenant's p50, ms", "p99, ms",
        "scripts a request", "us of Redis a request",
        title=f"{options.workers} workers of {SLOTS} slots, load {options.load:g}, {options.turns} turns each",
    )  # fmt: skip
    for grace in options.graces:
        with sleeping_service(_STEP_SECONDS) as service:
            service.start_workers(options.workers, slots=SLOTS, prefix_affinity=True, prefix_grace=grace)
            run(service, 4.0, 4 * options.workers, 1)  # the first requests of a worker take longer
            rate = options.load * options.workers * SLOTS / ((_OUTPUTS + 1) * _STEP_SECONDS)
            found = run(service, rate, options.sessions, options.turns)
        requests = len(found.waits) + len(found.others)
        table.add_row(
            f"{grace:g}", f"{100 * found.hits / found.follow_ups:.1f}",
            *(f"{percentile(found.waits, percent):.1f}" for percent in (50, 99)),
            *(f"{percentile(found.others, percent):.1f}" for percent in (50, 99)),
            f"{found.scripts / requests:.1f}", f"{1e6 * found.cpu_seconds / requests:.0f}",
        )  # fmt: skip
    Console(width=140).print(table)


def run(service: SleepingService, rate: float, sessions: int, turns: int) -> Run:
    """Send requests at this rate a second. Each conversation, and each other request, has a thread of its own."""
    random, found = Random(1), Run()
    with Client(service.url, model="tiny") as client:
        threads = []
        before = Spent.read(service.client)
        for number in range(sessions):
            threads.append(threading.Thread(target=converse, args=(client, number, turns, found)))
            threads[-1].start()
            until = time.monotonic() + random.expovariate(rate * (1 - _OTHERS_SHARE) / turns)
            while (pause := min(until - time.monotonic(), random.expovariate(rate * _OTHERS_SHARE))) > 0:
                time.sleep(pause)
                if time.monotonic() < until:
                    threads.append(threading.Thread(target=ask_alone, args=(client, len(threads), found)))
                    threads[-1].start()
        for thread in threads:
            thread.join()
        spent = Spent.read(service.client) - before
    found.scripts, found.cpu_seconds = spent.scripts, spent.cpu_seconds
    return found


def converse(client: Client, number: int, turns: int, found: Run) -> None:
    """Hold one conversation."""
    random = Random(number)
    prompt = _tokens(random, _FIRST_PROMPT)
    for place in range(turns):
        waited, outputs, cached = ask(client, prompt, tenant="talks", prefix_key=f"session-{number}")
        found.waits.append(waited)
        if place:
            found.follow_ups += 1
            found.hits += cached > 0
        prompt = [*prompt, *outputs, *_tokens(random, _NEXT_PROMPT)]
        time.sleep(random.expovariate(1 / _THINK_SECONDS))


def ask_alone(client: Client, number: int, found: Run) -> None:
    """Send a request of the tenant without conversations."""
    waited, _, _ = ask(client, _tokens(Random(f"alone {number}"), _FIRST_PROMPT), tenant="other")
    found.others.append(waited)


def ask(client: Client, prompt: list[int], **options: Any) -> tuple[float, list[int], int]:
    """Return how long a request waited in ms, its output, and how many tokens of its prompt were cached."""
    sent, claimed = time.monotonic(), 0.0
    params = {"max_tokens": _OUTPUTS, "ignore_eos": True}
    request_id = client.submit(prompt_token_ids=prompt, sampling_params=params, **options)
    for event in client.events(request_id, timeout=_TIMEOUT):
        if isinstance(event, StartEvent):
            claimed = time.monotonic()
        elif isinstance(event, EndEvent):
            assert event.error is None, event.error
    result = client.result(request_id, timeout=_TIMEOUT)
    assert result.usage is not None
    return 1000 * (claimed - sent), list(result.outputs[0].token_ids), result.usage.cached_tokens


def _tokens(random: Random, count: int) -> list[int]:
    """Return tokens that share no prefix with another prompt."""
    return [random.randrange(40, 140) for _ in range(count)]


if __name__ == "__main__":
    main()
