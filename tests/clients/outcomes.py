"""Runs programs that write a line of JSON for each of their checks, and prints the table of what passed."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

SECONDS: Final = 900


def outcomes(name: str, command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what a program says of each check, and one more that failed if the program itself did."""
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [_failure(name, f"it took more than {SECONDS} s")]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"client"')]
    if done.returncode or not results:
        results.append(_failure(name, f"its program ended with status {done.returncode}"))
    if any(result["error"] is not None for result in results):
        progress(done.stderr[-6000:])
    return results


def _failure(name: str, error: str) -> dict[str, Any]:
    return {"client": name, "version": "", "feature": "all checks", "error": error}


def print_table(kind: str, results: Sequence[dict[str, Any]]) -> int:
    """Print a row for each check. Return the exit status: 1 if one failed."""
    print(f"| {kind} | version | what was tried | result |\n|---|---|---|---|")
    for result in results:
        outcome = "passed" if result["error"] is None else f"failed: {' '.join(result['error'].split())[:200]}"
        print(f"| {result['client']} | {result['version']} | {result['feature']} | {outcome} |")
    failed = sum(result["error"] is not None for result in results)
    print(f"\n{len(results) - failed} of {len(results)} passed")
    return 1 if failed else 0


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
