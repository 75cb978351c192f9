"""Where a model's files are: a folder, a hub name, or one GGUF file, which transformers dequantises."""

from pathlib import Path


def is_gguf(model: str) -> bool:
    return model.endswith(".gguf")


def pretrained_source(model: str) -> tuple[str, dict[str, str]]:
    """What transformers' `from_pretrained` functions take for a model: the first argument and the extra ones."""
    if is_gguf(model):
        path = Path(model)
        return str(path.parent), {"gguf_file": path.name}
    return model, {}
