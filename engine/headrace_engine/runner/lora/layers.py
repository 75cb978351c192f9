"""Applies adapters to the linear layers of a model. The requests of a packed step may use different adapters.

    tokens of a step   | base | a  a  a | b | base | a |
    groups             a: rows 1-3 and 6, b: row 4          the layers compute all rows; then each group adds
                                                            (x[rows] @ down) @ up to its rows

The layers themselves do not change. While a batch uses adapters, the layers that they modify have forward hooks.
Without adapters the model is exactly as it was loaded.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.runner.batch import StepInputs
from headrace_engine.runner.lora.adapter import Adapter, Target, read_adapter
from headrace_engine.runner.recurrent.recurrent_layers import RecurrentLayer

_Rows = slice | torch.Tensor
_Groups = list[tuple[_Rows, Adapter]]


class LoRALayers:
    """The adapters of one model by version, and the hooks that apply them."""

    def __init__(self, model: nn.Module, head: nn.Module | None, max_rank: int, dtype: torch.dtype) -> None:
        self._max_rank = max_rank
        self._dtype = dtype
        self._modules = dict(model.named_modules())
        # Recurrent layers compute the rows of a step in another order than the hooks expect.
        layers = [module for module in model.modules() if isinstance(module, RecurrentLayer)]
        recurrent = {module for layer in layers for module in layer.modules()}
        self._targets = {
            name: target
            for name, module in self._modules.items()
            if module not in recurrent and (target := _target(name, module)) is not None
        }
        self._head = head
        self._adapters: dict[int, Adapter] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._groups: _Groups = []
        self._head_groups: _Groups = []
        self._num_rows = (0, 0)

    def load(self, version: int, request: LoRARequest) -> None:
        """Read an adapter. Raises LoRAError if it cannot be served."""
        self._adapters[version] = read_adapter(request, self._targets, max_rank=self._max_rank, dtype=self._dtype)

    def unload(self, version: int) -> None:
        del self._adapters[version]

    def use(self, inputs: StepInputs) -> None:
        """Prepare the layers for a step. Call before each step."""
        if inputs.lora_versions is None:
            if self._hooks:
                for handle in self._hooks.values():
                    handle.remove()
                self._hooks.clear()
                self._groups = self._head_groups = []
            return
        of_tokens = _spread(inputs.lora_versions, inputs.metadata.query_start)
        self._groups = self._by_adapter(of_tokens)
        # The output head sees only the tokens whose logits are wanted.
        of_logits = of_tokens[inputs.logits_indices]
        self._head_groups = self._by_adapter(of_logits)
        self._num_rows = len(of_tokens), len(of_logits)
        for _, adapter in self._groups:
            for name in adapter.keys() - self._hooks.keys():
                self._hooks[name] = self._modules[name].register_forward_hook(partial(self._add_deltas, name))

    def _by_adapter(self, versions: torch.Tensor) -> _Groups:
        used = versions[versions >= 0].unique().tolist()  # type: ignore[no-untyped-call]
        return [(_rows(versions == version), self._adapters[version]) for version in used]

    def _add_deltas(self, name: str, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        is_head = module is self._head
        x = args[0].reshape(-1, args[0].shape[-1])
        y = output.view(-1, output.shape[-1])
        assert len(y) == self._num_rows[is_head], f"{name} computes {len(y)} rows, expected {self._num_rows[is_head]}"
        for rows, adapter in self._head_groups if is_head else self._groups:
            weights = adapter.get(name)
            if weights is None:
                continue
            inner = x[rows] @ weights.down
            if isinstance(rows, slice):
                y[rows].addmm_(inner, weights.up)
            else:
                y.index_add_(0, rows, inner @ weights.up)


def _target(name: str, module: nn.Module) -> Target | None:
    """Return the sizes of a module that adapters may modify: a linear layer that each token passes exactly once."""
    if ".experts." in name or any(True for _ in module.children()):
        return None
    for inside, outside in (("in_features", "out_features"), ("nx", "nf")):  # GPT-2's Conv1D has the second names
        sizes = getattr(module, inside, None), getattr(module, outside, None)
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            return Target(sizes[0], sizes[1])
    return None


def _spread(versions: Sequence[int | None], query_start: torch.Tensor) -> torch.Tensor:
    """Return the version of each token, -1 for none: [tokens] int64."""
    of_sequences = torch.tensor([-1 if version is None else version for version in versions])
    return of_sequences.repeat_interleave(query_start.diff())


def _rows(mask: torch.Tensor) -> _Rows:
    """Return the rows where the mask is set: a slice, which avoids a copy, if they are contiguous."""
    found = mask.nonzero()[:, 0]
    first, last = int(found[0]), int(found[-1])
    return slice(first, last + 1) if last - first + 1 == len(found) else found
