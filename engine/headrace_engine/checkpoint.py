"""Where a model's files are: a folder, a hub name, or one GGUF file, which transformers dequantises."""

import difflib
import re
from pathlib import Path

from headrace_engine import default_model
from headrace_engine.errors import ModelLoadError

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def is_gguf(model: str) -> bool:
    return model.endswith(".gguf")


def pretrained_source(model: str, revision: str | None = None) -> tuple[str, dict[str, str]]:
    """What transformers' `from_pretrained` functions take for a model: the first argument and the extra ones.

    Raises:
        ModelLoadError: the model is neither here nor a name that a hub could have.
    """
    _check_place(model)
    options = {} if revision is None else {"revision": revision}
    if is_gguf(model):
        path = Path(model)
        return str(path.parent), {**options, "gguf_file": path.name}
    return model, options


def _check_place(model: str) -> None:
    """Tell a mistyped path for what it is: transformers takes it for a name on the hub, and complains of that."""
    try:
        if Path(model).exists():
            return
    except (OSError, ValueError) as error:  # too long, or a zero byte in it
        raise ModelLoadError(f"model {model[:200]!r} is no path and no hub name: {error}") from error
    if is_gguf(model):
        raise ModelLoadError(f"model {model!r} cannot be read: there is no such file")
    if not _HUB_NAME.fullmatch(model):
        hint = ", and ~ is not expanded: give the whole path" if model.startswith("~") else ""
        raise ModelLoadError(f"model {model!r} cannot be read: there is no such folder{hint}")


def unreadable(model: str, error: Exception) -> ModelLoadError:
    """The error of a model whose configuration could not be read, which says what was looked for where."""
    if Path(model).exists():
        return ModelLoadError(f"model {model!r} cannot be read: {error}")
    near = difflib.get_close_matches(model.lower(), [default_model.NAME], 1)
    hint = f"did you mean {near[0]}? It" if near else f"the model {default_model.NAME}"
    return ModelLoadError(
        f"model {model!r} cannot be read: there is no such folder, and the hub did not give a model of this name: "
        f"{error}; {hint} can be had without a hub"
    )
