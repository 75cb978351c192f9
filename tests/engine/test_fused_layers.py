"""Fused decoder layers: the passes are right, and a layer is replaced exactly where it computes the common thing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.model_families import MAX_POSITIONS
from engine.tiny_models import TinyModel
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.runner.elementwise import native_ops
from headrace_engine.runner.elementwise.ops import Activation, Norm
from headrace_engine.runner.fused import fusion
from headrace_engine.runner.fused.decoder_layer import FusedDecoderLayer
from headrace_engine.runner.fused.decoder_stack import DecoderStack, stackable
from headrace_engine.runner.fused.fusion import decoder_layers
from headrace_engine.runner.linear import native_linear, packed_linear
from headrace_engine.runner.linear.native_linear import NativeLinear
from headrace_engine.runner.linear.packed_linear import PackedLinear
from headrace_engine.runner.linear.prepared_linear import DeviceLinear, LinearKind
from headrace_engine.runner.models import loading
from headrace_engine.runner.models.paged_model import PagedModel

pytestmark = pytest.mark.rotated("engine/headrace_engine/runner/fused", "engine/headrace_engine/runner/native")

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
rows = pytest.mark.parametrize("rows", [1, 3, 64, 700])


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal up to one rounding of the data's own type."""
    torch.testing.assert_close(
        one.float(), other.float(), rtol=1e-2 if one.dtype is torch.bfloat16 else 2e-6, atol=1e-5
    )


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


@dtypes
@rows
@pytest.mark.parametrize("features", [8, 24, 576])
def test_add_rms_norm_computes_what_torch_does(dtype: torch.dtype, rows: int, features: int) -> None:
    hidden, delta = random(rows, features, dtype=dtype), random(rows, features, dtype=dtype) * 2
    weight = random(features, dtype=torch.float32)
    summed = (hidden.float() + delta.float()).to(dtype)
    close(native_ops.add_rms_norm(hidden.clone(), None, weight, 1e-5), normed(hidden, weight, 1e-5).to(dtype))
    out = native_ops.add_rms_norm(hidden, delta, weight, 1e-5)
    assert torch.equal(hidden, summed)
    close(out, normed(hidden.float() if dtype is torch.float32 else summed, weight, 1e-5).to(dtype))


@dtypes
@rows
def test_add_normed_computes_what_torch_does(dtype: torch.dtype, rows: int) -> None:
    hidden, delta = random(rows, 100, dtype=dtype), random(rows, 100, dtype=dtype) * 2
    weight = random(100, dtype=torch.float32)
    expected = (hidden.float() + normed(delta, weight, 1e-5)).to(dtype)
    native_ops.add_normed(hidden, delta, weight, 1e-5)
    close(hidden, expected)


def activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    return nn.functional.silu(gate) if activation is Activation.SILU else nn.functional.gelu(gate, approximate="tanh")


@dtypes
@rows
@pytest.mark.parametrize("activation", Activation)
def test_a_gate_computes_what_torch_does(dtype: torch.dtype, rows: int, activation: Activation) -> None:
    gate_up = random(rows, 2 * 300, dtype=dtype) * 20  # far into both tails, and no multiple of a vector
    gate, up = gate_up.float().chunk(2, dim=-1)
    close(native_ops.gate(gate_up, activation), (activated(gate, activation) * up).to(dtype))


@dtypes
@rows
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("rotary_dim", [0, 8, 16])
def test_head_norms_and_rotation_touch_queries_and_keys_alone(
    dtype: torch.dtype, rows: int, with_norm: bool, rotary_dim: int
) -> None:
    qkv = random(rows, (4 + 2 + 2) * 16, dtype=dtype)
    weights = [random(16, dtype=torch.float32) + 1 for _ in range(2)] if with_norm else [None, None]
    angles = random(rows, rotary_dim // 2, dtype=torch.float32).repeat(1, 2)
    cosine, sine = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotary_dim else (None, None)
    heads = qkv.float().view(rows, 8, 16).clone()
    for part, weight in zip((heads[:, :4], heads[:, 4:6]), weights, strict=True):
        if weight is not None:
            part.copy_(normed(part, weight, 1e-6))
        if cosine is not None and sine is not None:
            half = rotary_dim // 2
            first, second = part[..., :half].clone(), part[..., half:rotary_dim].clone()
            c, s = cosine.float()[:, None, :half], sine.float()[:, None, :half]
            part[..., :half] = first * c - second * s
            part[..., half:rotary_dim] = second * c + first * s
    native_ops.norm_rope(qkv, 4, 2, 16, q_weight=weights[0], k_weight=weights[1], eps=1e-6, cosine=cosine, sine=sine)
    close(qkv, heads.view(rows, -1).to(dtype))


@dtypes
@rows
def test_a_norm_of_all_heads_together_is_one_of_the_queries_and_one_of_the_keys(dtype: torch.dtype, rows: int) -> None:
    qkv = random(rows, (4 + 2 + 2) * 16, dtype=dtype)
    q_weight, k_weight = random(64, dtype=torch.float32) + 1, random(32, dtype=torch.float32) + 1
    wide = qkv.float()
    queries, keys = normed(wide[:, :64], q_weight, 1e-6), normed(wide[:, 64:96], k_weight, 1e-6)
    expected = torch.cat([queries, keys, wide[:, 96:]], dim=1)
    angles = random(rows, 8, dtype=torch.float32).repeat(1, 2)  # float32 in bfloat16 runs too, as in OLMo 2
    turned = expected.view(rows, 8, 16)[:, :6]
    first, second = turned.chunk(2, dim=-1)
    turned.copy_(turned * angles.cos()[:, None] + torch.cat((-second, first), dim=-1) * angles.sin()[:, None])
    native_ops.norm_rope(
        qkv, 4, 2, 16, q_weight=q_weight, k_weight=k_weight, eps=1e-6, cosine=angles.cos(), sine=angles.sin()
    )
    close(qkv, expected.to(dtype))


@dtypes
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("largest", [1, 100])
def test_a_norm_is_recognised_by_what_it_computes(kind: type[nn.Module], dtype: torch.dtype, largest: int) -> None:
    """The weights of a trained norm may be so large that in bfloat16 one more is hardly seen."""
    module: Any = kind(40, eps=1e-5).to(dtype)
    module.weight.data = (random(40, dtype=dtype) * largest).to(dtype)
    norm, x = Norm.of(module), random(3, 40, dtype=dtype)
    assert norm is not None
    assert torch.equal(norm.weight, module.weight.float() + (1 if kind is Gemma3RMSNorm else 0))
    close(native_ops.add_rms_norm(x.clone(), None, norm.weight, norm.eps), module(x))
    assert Norm.of(nn.LayerNorm(40, bias=False)) is None


def test_a_value_that_is_no_number_stays_in_its_row() -> None:
    hidden = random(4, 32, dtype=torch.bfloat16)
    hidden[1, 3] = float("nan")
    out = native_ops.add_rms_norm(hidden, None, torch.ones(32), 1e-5)
    assert out.isnan().any(dim=-1).tolist() == [False, True, False, False]


# Norms before, after and on both sides of a part; a weight plus one; GELU; merged projections; norms of all heads
# together; two kinds of rotation; scaled residuals.
FUSED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "granite")


def load(model: TinyModel, dtype: str) -> PagedModel:
    config = EngineArgs(model=model.folder, dtype=dtype).create_engine_config()
    return PagedModel(config.model, config.cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "fused"),
    [*((name, True) for name in FUSED), ("cohere", False), ("gpt2", False)],
)
def test_layers_of_known_parts_are_fused_and_others_are_left_alone(
    tiny_model: Callable[[str], TinyModel], name: str, fused: bool, dtype: str
) -> None:
    model = load(tiny_model(name), dtype)
    assert model.num_fused == (len(model._layout.layers) if fused else 0)
    in_one_call = fused and native_linear.preferred(model.spec.dtype)
    assert isinstance((decoder_layers(model._model) or [None])[0], DecoderStack) == in_one_call


# What a layer may do that its parts do not show.
def scaled_residual(layer: Any) -> None:
    layer.mlp.down_proj.register_forward_hook(lambda _, __, output: output * 0.22)


def other_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()  # not the tanh form


def scaled_queries(layer: Any) -> None:
    layer.self_attn.q_proj.register_forward_hook(lambda _, __, output: output * 2.0)


def norm_plus_one(layer: Any) -> None:
    layer.input_layernorm.register_forward_hook(lambda _, args, output: output * 1.5)


def scaled_far_away(layer: Any) -> None:
    attention = layer.self_attn
    own = type(attention).forward

    def forward(hidden_states: torch.Tensor, position_ids: Any = None, **more: Any) -> Any:
        far = (position_ids[0, :, None] > MAX_POSITIONS - 10).to(hidden_states.dtype)
        output, weights = own(attention, hidden_states, position_ids=position_ids, **more)
        return output * (1 + far), weights

    attention.forward = forward


@pytest.mark.parametrize("change", [scaled_residual, scaled_queries, norm_plus_one, scaled_far_away])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("linear", [PackedLinear, NativeLinear, DeviceLinear])
def test_a_layer_that_computes_anything_else_is_not_replaced(
    llama: TinyModel, change: Callable[[Any], None], dtype: torch.dtype, linear: LinearKind
) -> None:
    if linear is PackedLinear and not packed_linear.supports(dtype):
        pytest.skip(f"oneDNN computes no {dtype} on this processor")
    model = _reload(llama, dtype)
    change(model.model.layers[1])
    assert fusion.fuse_decoder_layers(model, MAX_POSITIONS, linear=linear) == 2
    assert not stackable(model.model.layers)
    assert [isinstance(layer, FusedDecoderLayer) for layer in model.model.layers] == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_mlp_of_another_activation_is_called_by_the_fused_layer(llama: TinyModel, dtype: torch.dtype) -> None:
    model = _reload(llama, dtype)
    other_activation(model.model.layers[1])
    assert fusion.fuse_decoder_layers(model, MAX_POSITIONS, linear=NativeLinear) == 3
    assert not stackable(model.model.layers)
    assert [layer.mlp is None for layer in model.model.layers] == [True, False, True]


def test_a_layer_without_rotation_is_fused_without_rotation(llama: TinyModel) -> None:
    model = _reload(llama, torch.float32)
    attention: Any = model.model.layers[2].self_attn
    own = type(attention).forward

    def without_positions(hidden_states: torch.Tensor, position_embeddings: Any, **more: Any) -> Any:
        still = (torch.ones_like(position_embeddings[0]), torch.zeros_like(position_embeddings[1]))
        return own(attention, hidden_states, still, **more)

    attention.forward = without_positions
    assert fusion.fuse_decoder_layers(model, MAX_POSITIONS) == 3
    assert all(layer.in_chain for layer in model.model.layers)
    assert [layer.with_rope for layer in model.model.layers] == [True, True, False]


class RunTwice(nn.ModuleList):
    """The layers of a looped transformer."""

    def __getitem__(self, index: Any) -> Any:
        return [*self, *self] if isinstance(index, slice) else super().__getitem__(index)


class Between(nn.ModuleList):
    """Layers of a model that does something of its own between them."""

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        return [lambda hidden, layer=layer, **more: layer(hidden * 1.3, **more) for layer in self]


@pytest.mark.parametrize("kind", [nn.ModuleList, RunTwice, Between])
def test_layers_are_computed_in_one_call_only_where_the_model_runs_through_them_once_and_does_nothing_between(
    llama: TinyModel, kind: type[nn.ModuleList], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = loading.load_weights

    def load_weights(*args: Any, **options: Any) -> Any:
        model: Any = own(*args, **options)
        model.model.layers = kind(model.model.layers)
        return model

    monkeypatch.setattr(loading, "load_weights", load_weights)
    monkeypatch.setattr(native_linear, "preferred", lambda _: True)
    layers = decoder_layers(load(llama, "float32")._model)
    assert layers is not None
    assert [type(layer) for layer in layers] == ([DecoderStack] if kind is nn.ModuleList else [FusedDecoderLayer] * 3)


def test_layers_whose_weights_are_read_elsewhere_stay(llama: TinyModel) -> None:
    model = _reload(llama, torch.float32)
    assert fusion.fuse_decoder_layers(model, MAX_POSITIONS, keep={model.model.layers[0].mlp.up_proj}) == 2


def _reload(tiny: TinyModel, dtype: torch.dtype) -> Any:
    """The transformers model with an attention function of its own name."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("fusion_test", fusion._plain_attention)
    return AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=dtype, attn_implementation="fusion_test").eval()


def test_a_damaged_library_is_built_anew(tmp_path: Path) -> None:
    """Each time in a process of its own, as one that has loaded a library does not look at its file again."""
    load = "from headrace_engine.runner.elementwise.native_ops import library; library()"
    command = [sys.executable, "-c", load]
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, env=environ, check=True)
    [built] = tmp_path.rglob("*.so")
    whole = built.stat().st_size
    built.write_bytes(b"\x7fELF")
    subprocess.run(command, env=environ, check=True)
    assert built.stat().st_size == whole
