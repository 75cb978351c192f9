"""Records what sentence-transformers computes for the tiny folders and the real MiniLM.

    python -m engine.pooling.record_sentence_transformers [--record]

It needs sentence-transformers, the package of `make minilm`, and tests/ in PYTHONPATH. Without --record it compares
with the record, and ends with status 1 if a number has changed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers.utils import logging

from engine.pooling import real_minilm
from engine.pooling.parity_cases import PAIRS, RECORDED, TEXTS, VARIANTS, packed, read_recorded, unpacked, variants
from engine.pooling.tiny_pooling_models import EMBEDDERS, SCORERS


def compute() -> dict[str, Any]:
    found: dict[str, Any] = {"sentence-transformers": sentence_transformers.__version__}
    for name, make in EMBEDDERS.items():
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder))
            model = SentenceTransformer(folder, device="cpu")
            for variant in variants(name):
                rows = model.encode(TEXTS, batch_size=4, **VARIANTS[variant])
                found[f"{name}/{variant}"] = packed(rows.tolist())
    for name, make in SCORERS.items():
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder))
            scorer = CrossEncoder(folder, device="cpu")
            for variant, options in (("scores", {}), ("logits", {"activation_fn": torch.nn.Identity()})):
                scores = torch.tensor(scorer.predict(PAIRS, batch_size=4, **options))
                found[f"{name}/{variant}"] = packed(scores.view(len(PAIRS), -1).tolist())
    rows = SentenceTransformer(real_minilm.folder(), device="cpu").encode(real_minilm.TEXTS)
    found[real_minilm.CASE] = packed(rows.tolist())
    return found


def main() -> int:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    found = compute()
    if "--record" in sys.argv:
        RECORDED.write_text(json.dumps(found, indent=0) + "\n")
        print(f"{len(found) - 1} cases recorded")
        return 0
    before = read_recorded()
    worst = 0.0
    for name in sorted((set(found) | set(before)) - {"sentence-transformers"}):
        if name not in found or name not in before:
            print(f"{name} is only in {'the record' if name in before else 'the tests'}")
            worst = 1.0
            continue
        difference = torch.tensor(unpacked(found[name])) - torch.tensor(unpacked(before[name]))
        worst = max(worst, float(difference.abs().max()))
    print(f"sentence-transformers {sentence_transformers.__version__}: largest difference from the record {worst:.1e}")
    return int(worst > 2e-5)


if __name__ == "__main__":
    sys.exit(main())
