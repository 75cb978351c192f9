"""Activations by the compiled kernel: the values of torch, and the same bits wherever a value stands."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from headrace_engine.runner.pooling.row_activations import NativeActivation, replace_activations


def replaced(name: str) -> tuple[nn.Module, nn.Module]:
    own: nn.Module = ACT2FN[name]
    layer = nn.ModuleDict({"act": own})
    replace_activations(layer)
    assert isinstance(layer["act"], NativeActivation)
    return own, layer["act"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new"])
def test_values_are_those_of_torch_and_depend_on_nothing_else(name: str, dtype: torch.dtype) -> None:
    own, found = replaced(name)
    values = (4 * torch.randn(1, 700, 51, generator=torch.Generator().manual_seed(3))).to(dtype)
    together = found(values)
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 0.02, "atol": 1e-3}
    torch.testing.assert_close(together.float(), own(values.float()), **tolerance)  # torch rounds within some of them
    for row in (0, 1, 350, 699):
        assert torch.equal(found(values[:, row : row + 1]), together[:, row : row + 1])
    assert torch.equal(found(values[..., 7:29]), together[..., 7:29])


def test_an_activation_without_a_kernel_stays() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.ReLU())
    replace_activations(layer)
    assert [type(child) for child in layer] == [nn.Linear, nn.Tanh, nn.ReLU]
