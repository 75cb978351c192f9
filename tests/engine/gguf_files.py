"""Tiny GGUF files whose matrices are random blocks of any type: `gguf.quantize` knows few of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

Blocks = np.ndarray[Any, np.dtype[np.uint8]]

SIZES = {
    kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
}
"""Weights and bytes of a block."""
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block has float16 numbers. The other types: at 0."""
# The standard deviation of a weight, in units of the first scale, for random codes; and the second scale, in the same.
_SPREAD = {"Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9.2, "Q5_1": 9.2, "Q8_0": 74, "Q4_K": 250, "Q5_K": 500, "Q6_K": 1350}
_SPREAD |= {"IQ4_NL": 71, "IQ4_XS": 1300}
_SECOND = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}


def random_bytes(kind: str, rows: int, columns: int, seed: int = 0) -> Blocks:
    """Rows of blocks, every bit of which is random, except that scales are finite."""
    weights, size = SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        blocks[..., at + 1] &= 0xBF  # an exponent of at most 15
    return blocks.reshape(rows, -1)


def random_blocks(kind: str, rows: int, columns: int, *, spread: float, seed: int = 0) -> Blocks:
    """Rows of blocks with random codes, and scales that give the weights about this standard deviation."""
    weights, size = SIZES[kind]
    blocks = random_bytes(kind, rows, columns, seed).reshape(rows, columns // weights, size)
    scale = spread / _SPREAD[kind] * np.random.default_rng(seed + 1).uniform(0.8, 1.2, blocks.shape[:2])
    for at, factor in zip(HALVES.get(kind, (0,)), (1.0, _SECOND.get(kind, 0.0)), strict=False):
        blocks[..., at : at + 2] = (scale * factor).astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantised(kind: str, blocks: Blocks) -> np.ndarray[Any, np.dtype[np.float32]]:
    values: np.ndarray[Any, np.dtype[np.float32]] = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return values


_NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, *_, module, kind = name.split(".")
        return f"blk.{layer}.{_NAMES[module]}.{kind}"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(
        name, "output.weight"
    )


def write_model(
    path: Path,
    architecture: str,
    kind_of: Callable[[str], str],
    *,
    tied: bool = False,
    change: Callable[[str, Blocks], Blocks] = lambda _, blocks: blocks,
    **sizes: int,
) -> Path:
    """Write a tiny Llama or Qwen2.

    Args:
        kind_of: the type of a matrix, by its name in the file: one of SIZES, F16, or one that `gguf.quantize` knows.
        change: what is written in place of the blocks of a tensor.
        sizes: of the configuration, where they differ.
    """
    options: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        **sizes,
    }
    config = transformers.CONFIG_MAPPING[architecture](**options)
    with torch.device("meta"):
        tensors = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for seed, (long_name, tensor) in enumerate(tensors.items()):
        name = gguf_name(long_name)
        if tied and name == "output.weight":
            continue
        draw = np.random.default_rng(seed)
        if tensor.dim() == 1:
            writer.add_tensor(name, draw.normal(1.0 if "norm" in name else 0.0, 0.2, len(tensor)).astype(np.float32))
        elif (kind := kind_of(name)) == "F16":
            writer.add_tensor(name, draw.normal(0.0, 0.15, tuple(tensor.shape)).astype(np.float16))
        elif kind not in SIZES:
            number, values = gguf.GGMLQuantizationType[kind], draw.normal(0.0, 0.15, tuple(tensor.shape))
            writer.add_tensor(name, gguf.quantize(values.astype(np.float32), number), raw_dtype=number)
        else:
            blocks = random_blocks(kind, *tensor.shape, spread=0.15, seed=seed)
            writer.add_tensor(name, change(name, blocks), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
