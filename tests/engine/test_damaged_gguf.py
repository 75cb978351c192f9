"""Damaged GGUF files are refused at load. The message names the field or tensor, the value, and what is allowed."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.gguf_files import write_model
from headrace_engine import LLM
from headrace_engine.errors import ModelLoadError

pytestmark = pytest.mark.rotated("engine/headrace_engine/checkpoints", "engine/headrace_engine/runner/models")

Damage = Callable[[bytes], bytes]
_UINT32, _FLOAT32 = 4, 6


def _after(content: bytes, key: bytes, value: bytes) -> bytes:
    at = content.index(key) + len(key)
    return content[:at] + value + content[at + len(value) :]


def count(field: str, value: int) -> Damage:
    return lambda content: _after(content, field.encode() + struct.pack("<I", _UINT32), struct.pack("<I", value))


def number(field: str, value: float) -> Damage:
    return lambda content: _after(content, field.encode() + struct.pack("<I", _FLOAT32), struct.pack("<f", value))


def length(tensor: str, value: int) -> Damage:
    """Change the length of a tensor with one dimension."""
    return lambda content: _after(content, tensor.encode() + struct.pack("<I", 1), struct.pack("<Q", value))


def renamed(name: str) -> Damage:
    return lambda content: content.replace(name.encode(), name[:-1].encode() + b"_", 1)


AGAIN = "fetch or convert it again"
DAMAGES: list[tuple[Damage, str]] = [
    (lambda _: b"", "it begins with b'', not with b'GGUF': it is no GGUF file; fetch it again"),
    (lambda content: b"PK" + content, "it begins with b'PKGG', not with b'GGUF': it is no GGUF file; fetch it again"),
    (
        lambda content: content[:4] + struct.pack("<I", 9) + content[8:],
        "it is of GGUF version 9, supported are 2 and 3: convert the model again",
    ),
    (
        lambda content: content[:301],
        "it has 301 bytes and ends within its header: it is truncated; fetch it again",
    ),
    (renamed("general.architecture"), "field 'general.architecture' is missing: "),
    (
        count("qwen2.block_count", 0),
        f"'qwen2.block_count' must be at least 1, got 0: the file is damaged; {AGAIN}",
    ),
    (
        count("qwen2.block_count", 1),
        "tensor 'blk.1.attn_q.weight' belongs to no layer, because field 'qwen2.block_count' is 1: the file is",
    ),
    (count("qwen2.block_count", 3), f"lacks 12 weights, the first is 'model.layers.2.input_layernorm.weight': {AGAIN}"),
    (count("qwen2.context_length", 0), "field 'qwen2.context_length' must be at least 1, got 0: "),
    (count("qwen2.embedding_length", 0), "field 'qwen2.embedding_length' must be at least 1, got 0: "),
    (count("qwen2.attention.head_count", 0), "field 'qwen2.attention.head_count' must be at least 1, got 0: "),
    (count("qwen2.attention.head_count_kv", 0), "field 'qwen2.attention.head_count_kv' must be at least 1, got 0: "),
    (
        count("qwen2.attention.head_count", 4),
        "'blk.0.attn_k.weight' of damaged.gguf has 64 rows of 256 values, but the configuration in the file needs 128",
    ),
    (
        number("qwen2.attention.layer_norm_rms_epsilon", float("nan")),
        "field 'qwen2.attention.layer_norm_rms_epsilon' must be a finite number above 0, got nan: ",
    ),
    (number("qwen2.rope.freq_base", 0.0), "field 'qwen2.rope.freq_base' must be a finite number above 0, got 0.0: "),
    (
        length("blk.0.attn_q.bias", 200),
        "has the size [200], but the configuration needs [256]: fetch or convert the model again",
    ),
    (
        length("blk.1.attn_norm.weight", 128),
        "has the size [128], but the configuration needs [256]: fetch or convert the model again",
    ),
    (
        renamed("blk.0.ffn_norm.weight"),
        f"lacks 1 weights, the first is 'model.layers.0.post_attention_layernorm.weight': {AGAIN}",
    ),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "whole.gguf"
    return write_model(path, "qwen2", lambda _: "Q4_K").read_bytes()


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_file_is_refused_with_what_is_wrong(
    damage: Damage, message: str, whole: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(whole))
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        LLM(str(path), num_blocks=40, skip_tokenizer_init=True)
