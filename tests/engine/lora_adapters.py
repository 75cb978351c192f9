"""Random LoRA adapters in PEFT's format, and the model that each of them makes of a base model."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from engine.tiny_models import TinyModel
from headrace_engine.requests.lora_request import LoRARequest


@dataclass(frozen=True)
class TinyAdapter:
    name: str
    folder: Path
    merged: TinyModel
    """The base model with the adapter's weights added to its own."""

    @property
    def request(self) -> LoRARequest:
        return LoRARequest(self.name, lora_path=str(self.folder))


def config_of(targets: list[str], **settings: Any) -> dict[str, Any]:
    """What PEFT writes, as far as it matters."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "target_modules": targets,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "init_lora_weights": True,
        "inference_mode": True,
        **settings,
    }


def _meant(names: list[str], module: str) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def random_tensors(model: Any, config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """lora_A and lora_B of every layer that the config means."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if not _meant(config["target_modules"], name):
            continue
        rank = next((r for key, r in config["rank_pattern"].items() if _meant([key], name)), config["r"])
        if isinstance(module, Conv1D):
            inside, outside = module.nx, module.nf
        else:
            inside, outside = module.in_features, module.out_features
        prefix = f"base_model.model.{name}.lora_"
        tensors[f"{prefix}A.weight"] = torch.randn(rank, inside, generator=generator) * 0.3
        tensors[f"{prefix}B.weight"] = torch.randn(outside, rank, generator=generator) * 0.2
    return tensors


def write_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def merge(model: Any, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """W + alpha / r * B A, as the definition has it."""
    merged = copy.deepcopy(model)
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." not in name:
                continue
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            rank = down.shape[0]
            patterns = config["alpha_pattern"].items()
            alpha = next((a for key, a in patterns if _meant([key], module)), config["lora_alpha"])
            scaling = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
            delta = scaling * (tensors[name.replace("lora_A", "lora_B")] @ down)
            weight = merged.get_submodule(module).weight
            weight += delta if weight.shape == delta.shape else delta.t()  # GPT-2 keeps its weights transposed
    return merged


def make_adapter(model: TinyModel, folder: Path, name: str, seed: int, **settings: Any) -> TinyAdapter:
    config = config_of(**settings)
    tensors = random_tensors(model.reference, config, seed)
    write_adapter(folder, config, tensors)
    merged = TinyModel(f"{model.name}+{name}", model.folder, merge(model.reference, config, tensors))
    return TinyAdapter(name, folder, merged)
