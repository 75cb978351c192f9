"""The modules of sentence-transformers after the transformer, as their folders describe them. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace_engine.errors import ModelLoadError

POOLING_MODES: Final = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""In the order in which sentence-transformers concatenates the modes of old folders."""
_OLD_KEYS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_NOT_SERVED: Final = {
    "StaticEmbedding": "embeds words without a transformer: sentence-transformers itself is fast with it",
    "SpladePooling": "gives sparse vectors; served are dense ones",
    "SparseStaticEmbedding": "gives sparse vectors; served are dense ones",
    "SparseAutoEncoder": "gives sparse vectors; served are dense ones",
    "MultiVectorMask": "gives a vector for each token; served is one vector a text",
    "CLIPModel": "embeds images; served are texts",
    "Router": "has several ways through the model: serve the folder of one of them",
    "Asym": "has several ways through the model: serve the folder of one of them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    modes: tuple[str, ...]
    """One or several of `POOLING_MODES`, concatenated in this order."""
    include_prompt: bool
    """False: the tokens of the prompt are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """activation(weight x + bias), plus x itself if `use_residual`."""

    weights: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    use_residual: bool
    gives_scores: bool
    """Whether the outputs are scores of a cross-encoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm:
    weights: Path
    dimension: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalize:
    """Divide by the Euclidean norm."""


PoolingModule = Pooling | Dense | LayerNorm | Normalize


def read_module(model: str, name: str, folder: Path) -> PoolingModule | None:
    """Read the folder of one module. Return None for a module that does nothing in inference.

    Args:
        model: for messages.
        name: the class of sentence-transformers, without its package.

    Raises:
        ModelLoadError: the module is not served.
    """
    config = json.loads((folder / "config.json").read_bytes()) if (folder / "config.json").is_file() else {}
    match name:
        case "Pooling":
            return _pooling(model, config)
        case "Dense":
            return _dense(model, folder, config)
        case "LayerNorm":
            return LayerNorm(weights=weights_of(model, folder), dimension=config["dimension"])
        case "Normalize":
            _check_names(model, name, config)
            return Normalize()
        case "Dropout":
            return None
    reason = _NOT_SERVED.get(name, "is not served; Pooling, Dense, LayerNorm and Normalize are")
    raise ModelLoadError(f"model {model!r} has the module {name}, which {reason}")


def _pooling(model: str, config: dict[str, Any]) -> Pooling:
    given = config.get("pooling_mode")
    if given is None:
        given = [mode for key, mode in _OLD_KEYS.items() if config.get(key, False)] or ["mean"]
    modes = (given,) if isinstance(given, str) else tuple(given)
    unknown = [mode for mode in modes if mode not in POOLING_MODES]
    if unknown or not modes:
        raise ModelLoadError(
            f"model {model!r} has the pooling mode {', '.join(map(repr, unknown)) or 'of an empty list'}; served are "
            f"{', '.join(POOLING_MODES)}"
        )
    return Pooling(modes=modes, include_prompt=bool(config.get("include_prompt", True)))


def _dense(model: str, folder: Path, config: dict[str, Any]) -> Dense:
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    gives_scores = config.get("module_output_name") == "scores"
    _check_names(model, "Dense", config, outputs=("sentence_embedding", "scores"))
    return Dense(
        weights=weights_of(model, folder),
        in_features=config["in_features"],
        out_features=config["out_features"],
        bias=bool(config.get("bias", True)),
        activation=check_activation(model, folder.name, name),
        use_residual=bool(config.get("use_residual", False)),
        gives_scores=gives_scores,
    )


def _check_names(
    model: str, name: str, config: dict[str, Any], outputs: tuple[str, ...] = ("sentence_embedding",)
) -> None:
    """Refuse a module that reads or writes anything but the vector of a text."""
    for key, served in (("module_input_name", ("sentence_embedding",)), ("module_output_name", outputs)):
        found = config.get(key)
        if found is not None and found not in served:
            raise ModelLoadError(f"model {model!r} has the module {name} with {key} {found!r}, which is not served")


def weights_of(model: str, folder: Path) -> Path:
    """Return the weights of a module. Raises ModelLoadError if they are pickled or missing."""
    found = folder / "model.safetensors"
    if found.is_file():
        return found
    if (folder / "pytorch_model.bin").is_file():
        raise ModelLoadError(
            f"model {model!r} has pickled weights in {folder.name}/pytorch_model.bin, which are never loaded: convert "
            "them to model.safetensors, for example with SentenceTransformer(...).save_pretrained"
        )
    raise ModelLoadError(f"model {model!r} lacks {folder.name}/model.safetensors")


def check_activation(model: str, place: str, name: object) -> str:
    """Return the name of a class in torch.nn, such as Tanh. Raises ModelLoadError for another name."""
    if isinstance(name, str):
        package, _, kind = name.rpartition(".")
        if package in ("torch.nn", "torch.nn.modules.activation", "torch.nn.modules.linear") and kind.isidentifier():
            return kind
    raise ModelLoadError(
        f"model {model!r} has the activation {name!r} in {place}; served are torch.nn.Identity and the classes "
        "of torch.nn.modules.activation"
    )
