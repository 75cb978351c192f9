"""The checks of one client: functions that `check` collects and `main` runs, a line of JSON on stdout for each.

The programs that import this run in the clients' own environment, which has nothing of Headrace.
"""

import asyncio
import inspect
import json
import sys
import traceback
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

Check = Callable[["Site"], Any]
_checks: dict[str, Check] = {}

TEXTS = ["the mill", "a wheel in the water", "river"]
QUERY = "water"
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
    redis_url: str
    embedder: str
    """A model that embeds."""
    reranker: str
    """A model that scores."""

    @property
    def root(self) -> str:
        """The URL without /v1, for clients of Cohere and TEI."""
        return self.url.removesuffix("/v1")

    def answer(self, path: str, **body: Any) -> Any:
        """Return what the gateway answers to a plain POST."""
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.root + path, json.dumps(body).encode(), head)
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    @property
    def rows(self) -> list[list[float]]:
        """The embeddings of TEXTS."""
        found = self.answer("/v1/embeddings", model=self.embedder, input=TEXTS)["data"]
        return [each["embedding"] for each in found]

    @property
    def ranking(self) -> list[tuple[int, float]]:
        """The indices and scores of TEXTS for QUERY, the best first."""
        found = self.answer("/v1/rerank", model=self.reranker, query=QUERY, documents=TEXTS)["results"]
        return [(each["index"], each["relevance_score"]) for each in found]


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


def same_rows(left: Any, right: Any) -> None:
    """Compare embeddings. A client may have rounded them."""
    same([len(row) for row in left], [len(row) for row in right])
    apart = max(abs(one - other) for rows in zip(left, right, strict=True) for one, other in zip(*rows, strict=True))
    if apart > 1e-6:
        raise AssertionError(f"the rows differ by {apart}")


def same_ranking(left: Any, right: Any) -> None:
    same([index for index, _ in left], [index for index, _ in right])
    same_rows([[score for _, score in left]], [[score for _, score in right]])


def is_colour(arguments: object) -> None:
    """Arguments of a call of `paint`, as JSON or as an object."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(found, dict) or found.get("colour") not in ("red", "green"):
        raise AssertionError(f"{arguments!r} are no arguments of paint")
