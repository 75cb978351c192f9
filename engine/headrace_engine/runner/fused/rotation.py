"""`Rotation`: one of the ways in which a model calls its rotary embedding, for layers of one kind."""

from typing import Any

import torch
from torch import nn

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [1, tokens, rotary_dim]."""


class Rotation:
    """Layers with sliding windows may rotate by other frequencies than layers without (Gemma 3)."""

    def __init__(self, rotary: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._rotary = rotary
        self._args = args
        self._options = options

    def __call__(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tables:
        """Return the tables for positions [1, tokens]. They have the type of `hidden`."""
        tables: Tables = self._rotary(hidden, positions, *self._args, **self._options)
        return tables


class RotationRecorder:
    """Records the calls of a rotary embedding in a probe run. Call `remove` afterwards."""

    def __init__(self, rotary: nn.Module | None) -> None:
        self._found: list[tuple[Any, Rotation]] = []
        self._hook = None if rotary is None else rotary.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, rotary: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        if len(args) >= 2:  # hidden states and positions
            self._found.append((output, Rotation(rotary, args[2:], options)))

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def rotation_of(self, tables: Any) -> Rotation | None:
        """Return the call that returned these very tables, or None."""
        return next((rotation for output, rotation in self._found if output is tables), None)
