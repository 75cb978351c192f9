"""`make matrix`: runs a short suite with each Python, Redis server, Celery producer and torch that is supported.

Every cell that needs other packages has its own environment in `.venv-matrix`, which is kept for the next run. The
result is the table of docs/compatibility.md. Exit status 1: a cell failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from matrix import environments
from matrix.cells import Cell, all_cells
from matrix.servers import installed_servers

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "compatibility.md"
LONGEST_SECONDS: Final = 1800
_BEGIN, _END = "<!-- table: written by make matrix -->\n", "<!-- end of the table -->\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cell gave."""

    cell: str
    state: str
    """`passed`, `failed` or `not here`."""
    details: str
    """Versions of packages or of the server, or why there is no result."""
    summary: str = ""
    """pytest's last line."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m matrix", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cells whose name contains one of these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there, too")
    parser.add_argument("--write", action="store_true", help="write the table into docs/compatibility.md")
    options = parser.parse_args()
    console = Console(stderr=True)
    cells = [
        cell
        for cell in all_cells(installed_servers())
        if not options.only or any(text.lower() in cell.name for text in options.only)
    ]
    outcomes = []
    for number, cell in enumerate(cells, 1):
        console.print(f"[{number}/{len(cells)}] {cell.name}", end=" ", markup=False)
        started = time.monotonic()
        outcome = run(cell)
        console.print(f"{outcome.state}, {outcome.summary or outcome.details} ({time.monotonic() - started:.0f} s)")
        outcomes.append(outcome)
    found = [asdict(outcome) for outcome in outcomes]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.write:
        write_table(outcomes)
    print(json.dumps(found, indent=1))  # noqa: T201
    return any(outcome.state == "failed" for outcome in outcomes)


def run(cell: Cell) -> Outcome:
    python, environ = Path(sys.executable), dict(os.environ)
    try:
        if cell.packages:
            folder = ROOT / ".venv-matrix" / cell.name
            python = environments.make(folder, cell.packages, cell.python)
    except environments.NotHereError as error:
        return Outcome(cell.name, "not here", str(error))
    details = environments.versions(python, cell)
    if cell.is_producer:
        environ["HEADRACE_TEST_PRODUCER"], python = str(python), Path(sys.executable)
    if cell.server:
        environ["HEADRACE_TEST_SERVER"] = cell.server
    command = [str(python), "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:randomly", *cell.tests]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    summary = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "")
    if done.returncode:
        sys.stderr.write("\n".join(lines[-40:]) + done.stderr[-2000:] + "\n")
    return Outcome(cell.name, "failed" if done.returncode else "passed", details, summary.strip("= "))


def write_table(outcomes: list[Outcome]) -> None:
    """Replace the table of the page. Cells that did not run now keep their rows."""
    before, rest = PAGE.read_text().split(_BEGIN)
    old, after = rest.split(_END)
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in old.splitlines()[2:]}
    today = datetime.now(UTC).date().isoformat()
    for outcome in outcomes:
        rows[outcome.cell] = f"| {outcome.cell} | {outcome.state} | {outcome.details} | {today} |"
    head = "| with | result | versions | run |\n|---|---|---|---|\n"
    PAGE.write_text(f"{before}{_BEGIN}{head}" + "".join(f"{row}\n" for row in rows.values()) + f"{_END}{after}")


if __name__ == "__main__":
    sys.exit(main())
