"""Finds missing and incomplete weight files of a model's folder, by their headers alone."""

import json
import os
from pathlib import Path

from headrace_engine.checkpoints.checkpoint import tensors_in
from headrace_engine.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"


def check_weight_files(model: str) -> None:
    """Check the safetensors files of a folder. Other models are not checked.

    Raises:
        ModelLoadError: names the first file that is missing, incomplete or damaged.
    """
    folder = Path(model)
    if not folder.is_dir():
        return
    try:
        index = folder / _INDEX
        named = json.loads(index.read_bytes())["weight_map"].values() if index.is_file() else ()
        files = sorted({*(folder / name for name in named), *folder.glob("*.safetensors")})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"model {model!r} cannot be read: {_INDEX} is damaged: {error}") from error
    if not files:
        raise ModelLoadError(f"model {model!r} has no *.safetensors")
    for file in files:
        reason = _fault_of(file)
        if reason is not None:
            raise ModelLoadError(f"model {model!r} cannot be loaded: {file.name} {reason}: fetch the model again")


def _fault_of(file: Path) -> str | None:
    try:
        with file.open("rb") as opened:
            tensors = tensors_in(opened)
            needed = opened.tell() + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
            size = os.fstat(opened.fileno()).st_size
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"has no readable header ({type(error).__name__})"
    return None if size == needed else f"has {size} bytes and should have {needed}"
