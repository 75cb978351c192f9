"""Reads a LoRA adapter in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`. Nothing is unpickled.

Unsupported features of PEFT are refused, and the error names all of them at once. Method: Hu et al. 2021 (LoRA),
Kalajdzievski 2023 (rank-stabilised scaling).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace_engine.errors import LoRAError
from headrace_engine.requests.lora_request import LoRARequest

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_MAX_PROBLEMS_SHOWN = 12
_PREFIX = "base_model.model."
_TENSOR_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(\.default)?\.weight")
# Settings that must be absent or empty, with the words for them in the error.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "modules_to_save": "fully trained modules",
    "layer_replication": "replicated layers",
    "lora_bias": "a bias in lora_B",
    "target_parameters": "adapters of parameters that belong to no linear layer",
    "trainable_token_indices": "trained token embeddings",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
}
# Initialisations that do not change the base weights.
_HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer that an adapter may change."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class LoRAWeights:
    """The weights for one layer: y += (x @ down) @ up."""

    down: torch.Tensor
    """[in_features, rank]: PEFT's A, transposed."""
    up: torch.Tensor
    """[rank, out_features]: PEFT's B, transposed and scaled."""


Adapter = dict[str, LoRAWeights]
"""Name of a layer in the model -> its weights."""


def read_adapter(request: LoRARequest, targets: Mapping[str, Target], *, max_rank: int, dtype: torch.dtype) -> Adapter:
    """Read the weights of an adapter, in the type of the model.

    Args:
        targets: the linear layers of the model by name.

    Raises:
        LoRAError: the adapter cannot be served with this model and these limits.
    """
    folder = Path(request.lora_path)
    problems: list[str] = []
    config = _read_config(folder, problems)
    if problems:
        raise _refusal(request, problems)
    _check_config(config, targets, problems)
    adapter: Adapter = {}
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt", device="cpu") as weights:
            ranks = _check_shapes(weights, config, targets, max_rank, problems)
            if not problems:
                adapter = {module: _layer(weights, config, module, names, dtype) for module, names in ranks.items()}
    except FileNotFoundError:
        problems.append(_missing_weights(folder))
    except (SafetensorError, OSError) as error:
        problems.append(f"{WEIGHTS_FILE} cannot be read: {type(error).__name__}")
    for module, layer in adapter.items():
        if not (bool(layer.down.isfinite().all()) and bool(layer.up.isfinite().all())):
            problems.append(f"the weights of {module} hold infinite values or NaN")
    if problems:
        raise _refusal(request, problems)
    return adapter


def _refusal(request: LoRARequest, problems: list[str]) -> LoRAError:
    shown = problems[:_MAX_PROBLEMS_SHOWN]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more problems")
    return LoRAError([f"LoRA adapter {request.lora_name!r}: {problem}" for problem in shown])


def _read_config(folder: Path, problems: list[str]) -> dict[str, Any]:
    # The folder is not named: a caller who sent only the name of the adapter may see the message.
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
    except FileNotFoundError:
        problems.append(f"its folder holds no {CONFIG_FILE}" if folder.is_dir() else "its folder does not exist")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{CONFIG_FILE} cannot be read: {type(error).__name__}")
        return {}
    if not isinstance(config, dict):
        problems.append(f"{CONFIG_FILE} must hold a map")
        return {}
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        problems.append(f"r must be an integer of at least 1, got {rank!r}")
    if not _is_number(alpha):
        problems.append(f"lora_alpha must be a number, got {alpha!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict):
            problems.append(f"{name} must be a map")
            continue
        for key, value in pattern.items():
            if not re.fullmatch(r"\^?[\w.]+", key):
                problems.append(f"{name} has the key {key!r}: only plain module names are supported")
            elif not _is_number(value) or (name == "rank_pattern" and (type(value) is not int or value < 1)):
                problems.append(f"{name} gives {value!r} for {key}")
    return config


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_config(config: Mapping[str, Any], targets: Mapping[str, Target], problems: list[str]) -> None:
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type must be 'LORA', got {config.get('peft_type')!r}")
    problems += [
        f"{key} is set: {meaning} is not supported" for key, meaning in _UNSUPPORTED.items() if config.get(key)
    ]
    if config.get("bias", "none") != "none":
        problems.append(f"bias must be 'none', since trained biases are not supported, got {config['bias']!r}")
    if config.get("init_lora_weights") not in _HARMLESS_INITS:
        problems.append(
            f"init_lora_weights is {config['init_lora_weights']!r}, which changes the model's own weights: "
            "convert the adapter to plain LoRA first"
        )
    wanted = config.get("target_modules")
    if isinstance(wanted, list):
        problems += [
            f"target_modules names {name!r}, which is not a linear layer of this model"
            for name in wanted
            if not any(_means(str(name), module) for module in targets)
        ]


def _means(name: str, module: str) -> bool:
    """Whether a name matches a module by PEFT's rule: the whole name, or the end of it."""
    if name.startswith("^"):
        return module == name[1:]
    return module == name or module.endswith(f".{name}")


def _setting(config: Mapping[str, Any], name: str, pattern: str, module: str) -> Any:
    """Return the rank or alpha for a module: the value of the first matching pattern, or else the general value."""
    exceptions = config.get(pattern) or {}
    return next((value for key, value in exceptions.items() if _means(key, module)), config[name])


def _check_shapes(
    weights: Any, config: Mapping[str, Any], targets: Mapping[str, Target], max_rank: int, problems: list[str]
) -> dict[str, dict[str, str]]:
    """Return the names of the tensors by module and matrix (A, B). Check their shapes before any is read."""
    found: dict[str, dict[str, str]] = {}
    for tensor in weights.keys():  # noqa: SIM118  # no mapping
        match = _TENSOR_NAME.fullmatch(tensor.removeprefix(_PREFIX))
        if match is None:
            problems.append(f"{tensor} is not the lora_A or lora_B of a linear layer, and only these are supported")
        else:
            found.setdefault(match["module"], {})[match["matrix"]] = tensor
    if not found and not problems:
        problems.append(f"{WEIGHTS_FILE} holds no weights")
    for module, names in found.items():
        target = targets.get(module)
        if target is None:
            experts = ".experts." in module
            reason = "lies inside a mixture of experts" if experts else "is not a linear layer of this model"
            problems.append(f"{module} {reason}")
            continue
        rank = _setting(config, "r", "rank_pattern", module)
        if rank > max_rank:
            problems.append(f"{module} has rank {rank}, the limit is max_lora_rank={max_rank}")
        for matrix, shape in (("A", [rank, target.in_features]), ("B", [target.out_features, rank])):
            if matrix not in names:
                problems.append(f"{module} has no lora_{matrix}")
                continue
            actual = weights.get_slice(names[matrix]).get_shape()
            if actual != shape:
                problems.append(f"lora_{matrix} of {module} must have the shape {shape}, got {actual}")
    wanted = config.get("target_modules")
    if isinstance(wanted, list) and not problems:
        problems += [
            f"target_modules names {name!r}, but {WEIGHTS_FILE} holds no weights for it"
            for name in wanted
            if not any(_means(str(name), module) for module in found)
        ]
    return found


def _layer(
    weights: Any, config: Mapping[str, Any], module: str, names: Mapping[str, str], dtype: torch.dtype
) -> LoRAWeights:
    rank = _setting(config, "r", "rank_pattern", module)
    alpha = _setting(config, "lora_alpha", "alpha_pattern", module)
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    down, up = weights.get_tensor(names["A"]), weights.get_tensor(names["B"])
    # B is scaled before it is rounded to the type of the model. Both are transposed here, once for all steps.
    return LoRAWeights(down.t().to(dtype).contiguous(), (up.float() * scaling).t().to(dtype).contiguous())


def _missing_weights(folder: Path) -> str:
    if (folder / "adapter_model.bin").exists():
        return f"it has only adapter_model.bin, which is a pickle and never read: save it as {WEIGHTS_FILE}"
    return f"its folder holds no {WEIGHTS_FILE}"
