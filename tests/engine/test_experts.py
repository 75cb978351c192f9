"""Mixtures of experts by one product: right, independent of the other tokens, and used where they compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from engine.tiny_models import TinyModel
from headrace_engine.runner.elementwise import torch_ops
from headrace_engine.runner.elementwise.ops import Activation
from headrace_engine.runner.fused.expert_fusion import replace_experts
from headrace_engine.runner.linear.experts import NativeExperts

pytestmark = pytest.mark.rotated("engine/headrace_engine/runner/linear", "engine/headrace_engine/runner/fused")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])

EXPERTS = 5


def mixture(
    tokens: int, features: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Weights of the experts, and rows with their choices. The last number that is chosen is no expert."""
    generator = torch.Generator().manual_seed(tokens + features)
    gate_up, down = (
        (torch.randn(EXPERTS, *shape, generator=generator) / shape[1] ** 0.5).to(dtype)
        for shape in ((2 * width, features), (features, width))
    )
    x = torch.randn(tokens, features, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(EXPERTS + 1, generator=generator)[:3] for _ in range(tokens)])
    return gate_up, down, (x, chosen, torch.rand(tokens, 3, generator=generator).to(dtype))


def expected(gate_up: torch.Tensor, down: torch.Tensor, given: Any, activation: Activation) -> torch.Tensor:
    x, chosen, weights = given
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, (own, factors) in enumerate(zip(chosen.tolist(), weights.tolist(), strict=True)):
        for expert, factor in zip(own, factors, strict=True):
            if expert < EXPERTS:
                gated = torch_ops.gate((gate_up[expert].double() @ x[row].double())[None], activation)[0]
                out[row] += factor * (down[expert].double() @ gated)
    return out


@dtypes
@pytest.mark.parametrize("tokens", [1, 3, 40, 700])
@pytest.mark.parametrize(("features", "width"), [(64, 32), (50, 21)])
@pytest.mark.parametrize("activation", Activation)
def test_a_token_gets_the_weighted_sum_of_its_experts(
    dtype: torch.dtype, tokens: int, features: int, width: int, activation: Activation
) -> None:
    gate_up, down, given = mixture(tokens, features, width, dtype)
    found = NativeExperts(gate_up, down, activation)(*given)
    exact = expected(gate_up, down, given, activation)
    assert float((found.double() - exact).norm() / exact.norm()) < (2e-2 if dtype is torch.bfloat16 else 1e-6)


@dtypes
def test_a_token_depends_on_nothing_but_itself(dtype: torch.dtype) -> None:
    gate_up, down, given = mixture(1500, 64, 32, dtype)  # more pairs than are computed at once
    experts, threads = NativeExperts(gate_up, down, Activation.SILU), torch.get_num_threads()
    together = experts(*given)
    for begin, end in ((0, 1), (5, 8), (100, 400), (1499, 1500)):
        assert torch.equal(experts(*(each[begin:end] for each in given)), together[begin:end])
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(experts(*given), together)
    finally:
        torch.set_num_threads(threads)
    given[0][7] = float("nan")
    found = experts(*given)
    assert found[7].isnan().all()
    assert torch.equal(found[8:], together[8:])


def biased(experts: Any) -> None:
    experts.register_parameter("down_proj_bias", nn.Parameter(torch.ones(experts.down_proj.shape[:2])))


def up_before_gate(experts: Any) -> None:
    own = type(experts).forward

    def forward(*args: Any) -> Any:
        halves = experts.gate_up_proj.data.chunk(2, dim=1)
        kept, experts.gate_up_proj.data = experts.gate_up_proj.data, torch.cat(halves[::-1], dim=1)
        found = own(experts, *args)
        experts.gate_up_proj.data = kept
        return found

    experts.forward = forward


def exact_gelu(experts: Any) -> None:
    experts.act_fn = nn.GELU()


def squared_weights(experts: Any) -> None:
    own = type(experts).forward
    experts.forward = lambda x, chosen, weights: own(experts, x, chosen, weights * weights)


@pytest.mark.parametrize("change", [None, biased, up_before_gate, exact_gelu, squared_weights])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_are_replaced_where_they_compute_the_same(
    tiny_model: Callable[[str], TinyModel], name: str, change: Callable[[Any], None] | None
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(name).folder, dtype=torch.float32).eval()
    if change is not None:
        change(model.model.layers[1].mlp.experts)
    assert replace_experts(model) == (3 if change is None else 2)


def test_experts_of_another_layout_are_kept(tiny_model: Callable[[str], TinyModel]) -> None:
    from transformers import AutoModelForCausalLM

    assert replace_experts(AutoModelForCausalLM.from_pretrained(tiny_model("gpt_oss").folder)) == 0
