"""Replaces activations of torch by our own, so that the result of a text does not depend on the others.

torch computes the last values of a tensor by other instructions than the rest, and so the last values of each thread's
part. The kernel computes all values alike.
"""

from torch import Tensor, nn
from transformers import activations

from headrace_engine.runner.elementwise import native_ops
from headrace_engine.runner.elementwise.ops import Activation
from headrace_engine.runner.fused.layer_parts import computes
from headrace_engine.runner.pooling.gelu_fusion import is_exact_gelu

_KINDS = (nn.SiLU, nn.GELU, activations.SiLUActivation, activations.GELUTanh, activations.NewGELUActivation)


class NativeActivation(nn.Module):
    """An activation by the compiled kernel. None: the exact GELU."""

    def __init__(self, activation: Activation | None) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, values: Tensor) -> Tensor:
        rows = values.reshape(-1, values.shape[-1]).contiguous()
        return native_ops.activate(rows, self._activation).view(values.shape)


def replace_activations(model: nn.Module) -> None:
    """Replace the activations that the kernel has. Does nothing without the kernel."""
    if not native_ops.is_built():
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_exact_gelu(child):
                setattr(parent, name, NativeActivation(None))
            elif isinstance(child, _KINDS):
                found = next((each for each in Activation if computes(child, each)), None)
                if found is not None:
                    setattr(parent, name, NativeActivation(found))
