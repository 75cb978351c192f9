"""The checks of one client: functions that `check` collects and `main` runs, a line of JSON on stdout for each.

The programs that import this run in the clients' own environment, which has nothing of Headrace.
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

Check = Callable[["Site"], Any]
_checks: dict[str, Check] = {}

MESSAGES: list[Any] = [{"role": "user", "content": "Say hello."}]
COLOUR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
PAINT: dict[str, Any] = {
    "type": "function",
    "function": {"name": "paint", "description": "Paints the wall.", "parameters": COLOUR_SCHEMA},
}


@dataclass(frozen=True)
class Site:
    """Where the gateway is, and what it serves."""

    url: str
    """Ends in /v1."""
    model: str
    model_folder: str


def check(feature: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        _checks[feature] = function
        return function

    return add


def main(package: str, *, installed: str | None = None) -> None:
    """Run all checks of the client that this package is; `installed` is the version of one that is no package."""
    site = Site(*sys.argv[1:])
    for feature, function in _checks.items():
        error = None
        try:
            outcome = function(site)
            if inspect.iscoroutine(outcome):
                asyncio.run(outcome)
        except Exception as caught:  # noqa: BLE001  # whatever a client raises is the outcome
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}"
        line = {"client": package, "version": installed or version(package), "feature": feature, "error": error}
        print(json.dumps(line), flush=True)


def same(left: object, right: object) -> None:
    """As an assertion that says what it has seen."""
    if left != right:
        raise AssertionError(f"{left!r} is not {right!r}")


def is_colour(arguments: object) -> None:
    """Arguments of a call of `paint`, as JSON or as an object."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(found, dict) or found.get("colour") not in ("red", "green"):
        raise AssertionError(f"{arguments!r} are no arguments of paint")
