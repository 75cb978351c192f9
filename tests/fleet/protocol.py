"""`make fleet-protocol`: leases on one server and streams on two others, in seeded schedules of faults.

The product's `Leases` and `StreamWriter` run their Lua scripts on real servers. Time is virtual. Calls are lost,
arrive after the lease has expired, and overtake each other. Workers crash, servers are away, and stream servers
are added, drained and forgotten. After each schedule
the subscriber must have every token once and in order, the message must be acknowledged with the right result, and no
holder of the lease may have been fenced by a late claim. Variants with a fault must be found.
"""

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fleet.protocol_schedule import MUTATIONS, VARIANTS, Outcome, run_schedule
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer

Clients = tuple["redis.Redis", ...]
"""Of the server of the queue, and of the stream servers."""


@dataclass
class Row:
    """What the schedules of a variant did."""

    variant: str
    schedules: int = 0
    broken_readers: int = 0
    unfinished: int = 0
    owners_fenced: int = 0
    not_good: list[int] = field(default_factory=list)
    """Their seeds."""
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, seed: int, outcome: Outcome) -> None:
        self.schedules += 1
        self.broken_readers += outcome.is_broken
        self.unfinished += outcome.is_unfinished
        self.owners_fenced += outcome.is_owner_fenced
        self.not_good += [] if outcome.is_good else [seed]
        self.counts += outcome.counts

    @property
    def problem(self) -> str | None:
        """Why `make fleet-protocol` fails because of this row; None if it does not."""
        if self.variant in MUTATIONS:
            return None if self.not_good else f"no schedule has found the fault {self.variant}"
        is_mixed = self.variant == "upgrade"  # a worker of an earlier version fences by its late claims, as always
        if self.broken_readers or self.unfinished or (self.owners_fenced and not is_mixed):
            return f"{self.variant} fails in the schedules {', '.join(map(str, self.not_good))}"
        return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fleet.protocol", description=__doc__)
    parser.add_argument("--schedules", type=int, default=200, help="of each variant [200]")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule [0]")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    options = parser.parse_args()
    started = time.monotonic()
    logging.disable(logging.ERROR)  # the leases log each fault
    seeds = range(options.seed, options.seed + options.schedules)
    with three_servers() as clients:
        rows = [run_variant(name, track(seeds, name, transient=True), clients) for name in options.variants]
    console = Console(width=130)
    console.print(_table(rows))
    counts = rows[0].counts
    console.print(f"{rows[0].variant}:", ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())))
    console.print(f"{time.monotonic() - started:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    sys.exit("\n".join(row.problem for row in rows if row.problem) or 0)


@contextmanager
def three_servers() -> Iterator[Clients]:
    """Start a server for the queue and two for the streams, and yield a client of each."""
    with ExitStack() as stack:
        servers = [stack.enter_context(EmbeddedServer(environ={})) for _ in range(3)]
        yield tuple(stack.enter_context(connect(server.url)) for server in servers)


def run_variant(name: str, seeds: Sequence[int], clients: Clients) -> Row:
    """Run a schedule for each seed."""
    row = Row(name)
    for seed in seeds:
        row.add(seed, run_schedule(seed, VARIANTS[name], *clients))
    return row


def _table(rows: Sequence[Row]) -> Table:
    table = Table("variant", "", "schedules", "broken readers", "unfinished", "owners fenced by a late claim", "")
    for row in rows:
        figures = (row.schedules, row.broken_readers, row.unfinished, row.owners_fenced)
        found = "found" if row.not_good else "not found"
        verdict = found if row.variant in MUTATIONS else "fails" if row.problem else "holds"
        table.add_row(row.variant, VARIANTS[row.variant].about, *map(str, figures), verdict)
    return table


if __name__ == "__main__":
    main()
