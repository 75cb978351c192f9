"""Two tiny models with random weights: one embeds, one scores."""

from pathlib import Path
from typing import Final

from engine.pooling.tiny_pooling_models import NORMALIZE, add_modules, build, pooling

EMBEDDER: Final = "tiny-embedder"
RERANKER: Final = "tiny-reranker"


def save_pooling_models(folder: Path) -> list[Path]:
    """Make the folders of EMBEDDER and RERANKER in `folder`."""
    build(folder / EMBEDDER, "bert")
    add_modules(folder / EMBEDDER, [pooling(), NORMALIZE])
    build(folder / RERANKER, "bert", suffix="ForSequenceClassification", config={"num_labels": 1})
    return [folder / EMBEDDER, folder / RERANKER]
