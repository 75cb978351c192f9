"""The states of one recurrent layer for one group of sequences, with the methods of a cache of transformers."""

from collections.abc import Mapping
from typing import Any

import torch

StateName = tuple[str, int]
"""("conv" or "recurrent", index among the layer's states of this kind)"""


class StateCache:
    """Stands in for transformers' `Cache` in one call of a layer.

    Follows `LinearAttentionLayer` of transformers' cache_utils.py, which serves `generate`. The layer may change a
    state in place, or give a new one.

    Args:
        states: [sequences, ...] by name. Empty if the sequences begin with this call.
    """

    def __init__(self, states: Mapping[StateName, torch.Tensor]) -> None:
        self.states = dict(states)
        self._has_previous = bool(states)

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return self._has_previous

    def is_recording_past(self, _: int) -> bool:
        return False

    def get_conv_state(self, _: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, _: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self, inputs: torch.Tensor, _: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Return the last inputs of the convolution before this call, followed by its inputs: [sequences, ..., tokens].

        The state becomes the last `conv_kernel_size` of them.
        """
        size = inputs.shape[-1] if conv_kernel_size is None else conv_kernel_size
        if self._has_previous:
            inputs = torch.cat([self.states["conv", state_idx], inputs], dim=-1)
        else:
            inputs = torch.nn.functional.pad(inputs, (max(size - inputs.shape[-1], 0), 0))
        self.states["conv", state_idx] = inputs[..., -size:]
        return inputs

    def update_recurrent_state(self, state: torch.Tensor, _: int = 0, state_idx: int = 0, **__: Any) -> torch.Tensor:
        self.states["recurrent", state_idx] = state
        return state
