"""`RecurrentLayers`: the recurrent layers of a model, and the memory of their states.

A model's own layer computes one batch of sequences of equal length. It is called once for each group of a step
(`groups.py`) with the states of that group, so the results are those of transformers.

    states of a layer   slot | 0 | 1 | 2 | ...      one tensor for each of its states: [slots, channels, width],
                                                    [slots, heads, key size, value size]
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace_engine.runner.recurrent.groups import SequencePart, StateGroup, group
from headrace_engine.runner.recurrent.state_cache import StateCache, StateName

# How layers name the argument for their cache.
_CACHE_NAMES = ("cache_params", "past_key_values")


class RecurrentLayers:
    """Replaces the recurrent layers of a model: those with a convolution and a cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.groups: list[StateGroup] = []
        """The groups of the present step. Empty before `allocate`: the row is one new sequence."""
        self._layers: list[RecurrentLayer] = []
        self._dtype = model.dtype
        for parent in list(model.modules()):
            for name, module in list(parent.named_children()):
                cache_name = _cache_name(module)
                if cache_name is not None:
                    layer = RecurrentLayer(module, cache_name, self)
                    setattr(parent, name, layer)
                    self._layers.append(layer)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def bytes_per_state(self) -> int:
        """The bytes of one slot in all layers. Known after the first forward pass."""
        return sum(
            math.prod(shape) * dtype.itemsize for layer in self._layers for shape, dtype in layer.layout.values()
        )

    def allocate(self, num_slots: int) -> None:
        for layer in self._layers:
            layer.states = {
                name: torch.zeros(num_slots, *shape, dtype=dtype) for name, (shape, dtype) in layer.layout.items()
            }

    def copy(self, source: int, target: int) -> None:
        """Copy the states of all layers from one slot to another."""
        for layer in self._layers:
            layer.copy(source, target)

    @contextmanager
    def each_token_alone(self, num_tokens: int) -> Iterator[None]:
        """Treat each token of the next passes as a sequence of its own, without a state."""
        self.groups = group([[_new_sequence(row, 1)] for row in range(num_tokens)])
        try:
            yield
        finally:
            self.groups = []

    def differs_in_parts(self) -> str | None:
        """Return the name of a layer whose result depends on how a sequence is divided, None if there is no such layer.

        Computes eight random tokens at once, and in three parts. Allocates memory of its own. Call it after the first
        forward pass.
        """
        self.allocate(2)
        found = next((layer for layer in self._layers if layer.differs_in_parts(self._dtype)), None)
        for layer in self._layers:
            layer.states = {}
        return None if found is None else type(found.inner).__name__


class RecurrentLayer(nn.Module):
    """Calls a layer of a model once for each group of a packed step."""

    def __init__(self, inner: nn.Module, cache_name: str, step: RecurrentLayers) -> None:
        super().__init__()
        self.inner = inner
        self.layout: dict[StateName, tuple[torch.Size, torch.dtype]] = {}
        """The shape of each state of one sequence, as the first forward pass shows it."""
        self.states: dict[StateName, torch.Tensor] = {}
        self._input_size = 0
        self._cache_name = cache_name
        self._step = step

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """Compute a packed step: [1, tokens, features] -> [1, tokens, features]."""
        outputs: torch.Tensor | None = None
        groups = self._step.groups
        if not groups:
            assert not self.states, "a step has no groups"
            groups = group([[_new_sequence(0, hidden_states.shape[1])]])
        for part in groups:
            output = self._compute(hidden_states[0, part.rows], part, options)
            if outputs is None:
                outputs = output.new_empty(1, hidden_states.shape[1], output.shape[-1])
            outputs[0, part.rows] = output
        assert outputs is not None
        return outputs

    def _compute(self, hidden_states: torch.Tensor, part: StateGroup, options: dict[str, Any]) -> torch.Tensor:
        previous = {} if part.is_first else {name: states[part.slots] for name, states in self.states.items()}
        cache = StateCache(previous)
        # the mask of the whole row does not fit its parts, and hides padding only
        output: torch.Tensor = self.inner(hidden_states, **{**options, "attention_mask": None, self._cache_name: cache})
        if not self.layout:
            self.layout = {name: (state.shape[1:], state.dtype) for name, state in cache.states.items()}
            self._input_size = hidden_states.shape[-1]
        for name, states in self.states.items():
            is_changed_in_place = isinstance(part.slots, slice) and cache.states[name] is previous.get(name)
            if not is_changed_in_place:
                states[part.slots] = cache.states[name]
        for source, target in part.snapshots:
            self.copy(source, target)
        return output

    def copy(self, source: int, target: int) -> None:
        for states in self.states.values():
            states[target] = states[source]

    def differs_in_parts(self, dtype: torch.dtype) -> bool:
        """Whether the layer's result for a sequence depends on how it is divided. Uses slots 0 and 1."""
        inputs = torch.randn(1, 8, self._input_size, generator=torch.Generator().manual_seed(0)).to(dtype)
        results = []
        for slot, lengths in enumerate(([8], [4, 1, 3])):
            start, outputs = 0, []
            for length in lengths:
                one = SequencePart(first_row=0, num_tokens=length, is_first=start == 0, slot=slot)
                (part,) = group([[one]])
                outputs.append(self._compute(inputs[:, start : start + length], part, {}))
                start += length
            results.append(torch.cat(outputs, dim=1).float())
        whole, divided = results
        return bool((whole - divided).abs().max() > 0.05 * whole.abs().max())


def _new_sequence(first_row: int, num_tokens: int) -> SequencePart:
    return SequencePart(first_row=first_row, num_tokens=num_tokens, is_first=True, slot=first_row)


def _cache_name(module: nn.Module) -> str | None:
    """Return the name of a recurrent layer's argument for its cache, None if the module is no such layer."""
    if not any(isinstance(child, nn.Conv1d) for child in module.children()):
        return None
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), None)
