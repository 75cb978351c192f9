"""Quantises a model by rounding to nearest, and measures its perplexity by each driver, see gguf_perplexity.py.

    python -m engine.quantised_perplexity MODEL --bits 4 --group 64

Run it in the folder `tests`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from engine.gguf_perplexity import report
from engine.quantised_files import Integers, Kind, packed


def rounded(weight: torch.Tensor, kind: Kind) -> Integers:
    """Round a weight to nearest, with the smallest scales that clip nothing."""
    out, inputs = weight.shape
    groups = weight.double().view(out, -1, kind.group or inputs)
    top = (1 << kind.bits) - 1
    if kind.symmetric:
        scales = groups.abs().amax(2) / (top / 2)
        zeros = torch.full_like(scales, (top + 1) // 2)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low) / top
    stored = scales.to(kind.dtype)
    if not kind.symmetric:
        zeros = (-low / stored.double()).round().clamp(0, top)
    codes = (groups / stored.double()[..., None] + zeros[..., None]).round().clamp(0, top).view(out, inputs)
    group_of = np.arange(inputs) // (kind.group or inputs)
    return Integers(kind.bits, codes.numpy().astype(int), zeros.numpy().astype(int), stored, group_of)


def write_quantised(source: Path, folder: Path, kind: Kind) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        module, _, last = name.rpartition(".")
        if ".layers." in name and last == "weight" and value.dim() == 2:
            tensors.update(
                (f"{module}.{key}", each.contiguous()) for key, each in kind.write(rounded(value, kind)).items()
            )
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = value.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for path in source.glob("*.json"):
        if path.name != "model.safetensors.index.json":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": kind.config}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, help="inputs of a group; all by default")
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--chunks", type=int, default=6)
    options = parser.parse_args()
    kind = packed(options.bits, options.group, symmetric=options.symmetric, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_quantised(options.model, folder, kind)
        report(folder, None, options.chunks)


if __name__ == "__main__":
    main()
