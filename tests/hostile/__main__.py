"""`make hostile`: ten thousand hostile messages on a real service, and a table of the outcomes of each kind.

The exit status is 1 if a message was lost, an honest one was not served, the worker or its engine ended, text was
logged, a key was left over, or memory grew by more than the limit.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from chaos.model import save_chaos_model
from headrace_broker.server.embedded import EmbeddedServer
from hostile.harness import Account, Harness
from service.workers.service import Service

GROWTH_MIB = {"worker": 32.0, "engine": 192.0, "redis": 8.0}
"""The limit for each process's growth after a fifth of the messages; allocators keep some memory of large ones."""
BATCH = 250


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hostile", description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", nargs="+", default=[], metavar="KIND", help="kinds to leave out")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes to FILE")
    parser.add_argument("--log", metavar="FILE", help="keep the worker's log in FILE")
    options = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as temporary, EmbeddedServer(environ={}) as server:
        service = Service(server, save_chaos_model(Path(temporary) / "tiny"), Path(temporary))
        try:
            service.start_worker().wait_ready()
            service.generate().get(timeout=150)
            service.wait_settled()
            service.client.flushall()
            harness = Harness(service, options.seed, options.without)
            for _ in track(
                range(-(-options.messages // BATCH)), "hostile", console=console, disable=not sys.stderr.isatty()
            ):
                harness.run_batch(BATCH)
            harness.finish()
        finally:
            if options.log and service.workers:
                Path(options.log).write_text(service.workers[0].log_text())
            service.close()
    account = harness.account
    growth = asdict(account.growth(warm_up=max(1, len(account.memory) // 5)))
    account.problems += [
        f"memory of {name} grew by {grown} MiB, more than {GROWTH_MIB[name]}"
        for name, grown in growth.items()
        if grown > GROWTH_MIB[name]
    ]
    Console(width=None if sys.stdout.isatty() else 140).print(table(account, options.seed))
    console.print(f"{account.total} messages; memory grew by, MiB: {growth}")
    for problem in account.problems:
        console.print(problem, style="red", markup=False)
    if options.json:
        Path(options.json).write_text(json.dumps(account.to_json() | {"growth": growth}, indent=1))
    return 1 if account.problems else 0


def table(account: Account, seed: int) -> Table:
    outcomes = sorted({outcome for counter in account.outcomes.values() for outcome in counter})
    made = Table("kind", *outcomes, title=f"seed {seed}")
    for kind, counter in sorted(account.outcomes.items()):
        made.add_row(kind, *(str(counter[outcome] or "") for outcome in outcomes))
    return made


if __name__ == "__main__":
    sys.exit(main())
