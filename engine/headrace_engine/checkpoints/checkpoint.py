"""Finds the files of a model, and identifies its weights.

A model is a folder, a hub name, or one GGUF file.
"""

import difflib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from headrace_engine.checkpoints import default_model
from headrace_engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

_HUB_NAME: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)

_BLOCK: Final = 4096
_GGUF_BLOCKS: Final = 256
_GGUF_HEADER_BYTES: Final = 1 << 20
_MANY_TENSORS: Final = 2000
"""With this many tensors, one block of each is read; with fewer, three."""
_LARGEST_HEADER: Final = 100_000_000  # safetensors' own limit
# Entries that do not describe the weights, and differ between copies of a checkpoint.
_NO_IDENTITY: Final = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}


def is_gguf(model: str) -> bool:
    return model.endswith(".gguf")


def quick_reads(model: str) -> AbstractContextManager[None]:
    """Let transformers read a GGUF file, if the model is one, without building its vocabulary each time."""
    if not is_gguf(model):
        return nullcontext()
    from headrace_engine.checkpoints.gguf_reader import (
        without_vocabulary,  # imports gguf, which other models do not need
    )

    return without_vocabulary()


def pretrained_source(model: str, revision: str | None = None) -> tuple[str, dict[str, str]]:
    """Return the arguments of transformers' `from_pretrained` functions for a model: the first one, and keywords.

    Raises:
        ModelLoadError: there is no such folder or file, and the name cannot be that of a model on a hub.
    """
    _check_place(model)
    options = {} if revision is None else {"revision": revision}
    if is_gguf(model):
        path = Path(model)
        return str(path.parent), {**options, "gguf_file": path.name}
    return model, options


def _check_place(model: str) -> None:
    """Refuse a mistyped path with a clear message: transformers would report an invalid hub name."""
    try:
        if Path(model).exists():
            return
    except (OSError, ValueError) as error:  # too long, or contains a zero byte
        raise ModelLoadError(f"model {model[:200]!r} is no path and no hub name: {error}") from error
    if is_gguf(model):
        raise ModelLoadError(f"model {model!r} cannot be read: there is no such file")
    if not _HUB_NAME.fullmatch(model):
        hint = ", and ~ is not expanded: give the whole path" if model.startswith("~") else ""
        raise ModelLoadError(f"model {model!r} cannot be read: there is no such folder{hint}")


def unreadable(model: str, error: Exception) -> ModelLoadError:
    """Return the error for a model whose configuration could not be read."""
    if Path(model).exists():
        return ModelLoadError(f"model {model!r} cannot be read: {error}")
    near = difflib.get_close_matches(model.lower(), [default_model.NAME], 1)
    hint = f"did you mean {near[0]}? It" if near else f"the model {default_model.NAME}"
    return ModelLoadError(
        f"model {model!r} cannot be read: there is no such folder, and the hub did not give a model of this name: "
        f"{error}; {hint} can be had without a hub"
    )


def fingerprint(model: str, revision: str | None = None) -> str:
    """Return 16 hexadecimal digits that are equal for copies of a checkpoint, and differ for other weights.

    A digest of config.json, of the names, types and shapes of all tensors, and of samples of their bytes. It is cheap,
    and does not protect against deliberate collisions. It does not depend on the division into files, the dtype option
    or quantisation at load. Empty, with a warning, if the files cannot be read.
    """
    return _fingerprint(model, _digest_gguf if is_gguf(model) else partial(_digest_model, revision=revision))


def adapter_fingerprint(folder: str) -> str:
    """Return the fingerprint of a LoRA adapter in PEFT's format."""
    return _fingerprint(folder, _digest_adapter)


def _fingerprint(path: str, digest_files: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    try:
        digest_files(path, digest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        logger.warning("the weights of %s have no fingerprint: %s", path, type(error).__name__)
        return ""
    return digest.hexdigest()


def _digest_model(model: str, digest: Any, revision: str | None = None) -> None:
    folder = local_folder(model, revision)
    _digest_config(folder / "config.json", digest)
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = {"model.safetensors"}
    elif index.is_file():
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    else:
        files = {file.name for file in folder.glob("*.safetensors")}
    _digest_tensors([folder / name for name in files], digest)


def local_folder(model: str, revision: str | None) -> Path:
    """Return the folder of a model, that of the hub's cache for a hub name."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    from transformers.utils import cached_file

    return Path(cached_file(model, "config.json", revision=revision)).parent


def tensors_in(file: BinaryIO) -> dict[str, Any]:
    """Read the header of a safetensors file: a map for each tensor. Its bytes follow. Raises ValueError."""
    length = int.from_bytes(file.read(8), "little")
    if length > _LARGEST_HEADER:
        raise ValueError("the header is too long")
    header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def _digest_adapter(folder: str, digest: Any) -> None:
    _digest_config(Path(folder) / "adapter_config.json", digest)
    _digest_tensors([Path(folder) / "adapter_model.safetensors"], digest)


def _digest_config(file: Path, digest: Any) -> None:
    config = _without_noise(json.loads(file.read_bytes()))
    digest.update(json.dumps(config, sort_keys=True).encode())


def _without_noise(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_noise(part) for name, part in value.items() if name not in _NO_IDENTITY}


def _digest_tensors(files: list[Path], digest: Any) -> None:
    """Digest tensors in the order of their names, independent of their files."""
    tensors: dict[str, tuple[BinaryIO, int, int, str]] = {}
    with ExitStack() as opened:
        for path in files:
            file = opened.enter_context(path.open("rb"))
            header = tensors_in(file)
            start = file.tell()
            for name, tensor in header.items():
                begin, end = tensor["data_offsets"]
                about = json.dumps([name, tensor["dtype"], tensor["shape"]])
                tensors[name] = (file, start + begin, end - begin, about)
        if not tensors:
            raise ValueError("there are no tensors")
        for name in sorted(tensors):
            source, at, size, about = tensors[name]
            digest.update(about.encode())
            for offset in _sampled(size, 3 if len(tensors) < _MANY_TENSORS else 1):
                digest.update(os.pread(source.fileno(), min(_BLOCK, size - offset), at + offset))


def _digest_gguf(model: str, digest: Any) -> None:
    with Path(model).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(str(size).encode())
        digest.update(file.read(_GGUF_HEADER_BYTES))
        for offset in _sampled(size, _GGUF_BLOCKS):
            digest.update(os.pread(file.fileno(), _BLOCK, offset))


def _sampled(size: int, count: int) -> Iterator[int]:
    """Return the offsets of `count` evenly spaced blocks in `size` bytes. The last block ends at the end."""
    last = max(0, size - _BLOCK)
    return iter([last * part // max(1, count - 1) for part in range(count)])
