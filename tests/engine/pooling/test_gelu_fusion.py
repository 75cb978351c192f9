"""Which pairs of a linear layer and a GELU are computed at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headrace_engine.runner.linear import native_linear
from headrace_engine.runner.linear.native_linear import NativeGeluLinear
from headrace_engine.runner.pooling.gelu_fusion import GeluFusion

pytestmark = pytest.mark.skipif(not native_linear.preferred(torch.float32), reason="needs AVX2 and a compiler")


class FeedForward(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.act = activation or nn.GELU()
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.act(self.up(x)))
        return found


class GeluOfSum(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.act(self.up(x) + 1.0))
        return found


@torch.inference_mode()
def fused(model: nn.Module, keep: tuple[nn.Module, ...] = ()) -> int:
    """Fuse the model, and check that it computes the same as before."""
    x = torch.randn(5, 32)
    fusion = GeluFusion()
    with fusion.watch(model):
        before = model(x)
    count = fusion.apply(model, keep)
    torch.testing.assert_close(model(x), before)
    return count


def test_a_gelu_is_computed_by_the_layer_before_it() -> None:
    model = nn.Sequential(FeedForward(), FeedForward())
    assert fused(model) == 2
    assert isinstance(model[0].up, NativeGeluLinear)
    assert isinstance(model[0].act, nn.Identity)
    assert type(model[0].down) is nn.Linear


def test_layers_that_share_one_gelu_keep_it() -> None:
    gelu = nn.GELU()
    assert fused(nn.Sequential(FeedForward(gelu), FeedForward(gelu))) == 0


@pytest.mark.parametrize("model", [FeedForward(nn.GELU("tanh")), FeedForward(nn.ReLU()), GeluOfSum()])
def test_other_activations_and_other_inputs_stay(model: nn.Module) -> None:
    assert fused(model) == 0


def test_a_layer_whose_weight_is_read_stays() -> None:
    model = FeedForward()
    assert fused(model, keep=(model.up,)) == 0
