"""Mixtures of experts by the compiled kernel of `linear_experts.h`: all chosen experts of a step in one product."""

import ctypes
import os

import torch
from torch import nn

from headrace_engine.runner.elementwise.ops import Activation
from headrace_engine.runner.linear import native_linear
from headrace_engine.runner.linear.native_linear import LinearArgs, pack_into
from headrace_engine.runner.native import native_library
from headrace_engine.runner.native.huge_pages import HugePages
from headrace_engine.system.openmp import spin_count

_PAGES = HugePages()


class NativeExperts(nn.Module):
    """Replaces experts of transformers. Does not keep the original weights.

    Args:
        gate_up: [experts, 2 * width, features], gate before up.
        down: [experts, features, width].
        activation: of the gate.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation) -> None:
        super().__init__()
        self.num_experts, _, self._features = gate_up.shape
        self._gate_up, self._down = _packed(gate_up, gated=True), _packed(down, gated=False)
        self._args = native_linear.ExpertArgs(
            gate_up=_linear_args(gate_up, self._gate_up, activation),
            down=_linear_args(down, self._down, None),
            gate_up_bytes=self._gate_up[0].nbytes,
            down_bytes=self._down[0].nbytes,
            num_experts=self.num_experts,
        )

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of the chosen experts, [tokens, features].

        Args:
            hidden_states: [tokens, features].
            top_k_index, top_k_weights: [tokens, choices]. An index that is no expert adds nothing.

        Raises:
            MemoryError: there is no memory for the scratch space.
        """
        x, chosen, weights = (
            hidden_states.contiguous(),
            top_k_index.long().contiguous(),
            top_k_weights.float().contiguous(),
        )
        assert x.shape[1] == self._features
        assert chosen.shape == weights.shape
        out = torch.empty_like(x)
        args = native_linear.ExpertArgs.from_buffer_copy(self._args)
        args.gate_up.threads = args.down.threads = torch.get_num_threads()
        args.tokens, args.num_chosen = chosen.shape
        args.x, args.chosen = x.data_ptr(), chosen.data_ptr()
        args.weights, args.out = weights.data_ptr(), out.data_ptr()
        if native_linear.library().headrace_experts(ctypes.byref(args)):
            raise MemoryError(f"no memory for the experts of {len(x)} tokens")
        return out


def _packed(weights: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """[experts, out, in] -> [experts, elements of a packed weight]."""
    experts, out_features, in_features = weights.shape
    size = native_linear.packed_size(weights.dtype, gated, in_features, out_features)
    packed = _PAGES.empty((experts, size), weights.dtype)
    for own, weight in zip(packed, weights, strict=True):
        pack_into(own, weight.contiguous(), gated=gated)
    return packed


def _linear_args(weights: torch.Tensor, packed: torch.Tensor, activation: Activation | None) -> LinearArgs:
    _, out_features, in_features = weights.shape
    return LinearArgs(
        dtype=native_library.DTYPES[weights.dtype],
        spins=spin_count(os.environ),
        result=native_linear.result_of(gated=activation is not None),
        activation=activation or Activation.SILU,
        in_features=in_features,
        out_features=out_features,
        weight=packed.data_ptr(),
    )
