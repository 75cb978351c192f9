"""`ModuleTensors`: what a checkpoint has for one module, and the errors that name its tensors."""

from collections.abc import Callable, Mapping

import torch

from headrace_engine.errors import ModelLoadError

_AGAIN = "fetch or convert the checkpoint again"


class ModuleTensors:
    """The tensors of a module, by the last part of their names.

    Args:
        module: the module's name in the checkpoint.
        read: a function for each tensor, which reads it.
    """

    def __init__(self, module: str, read: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self.module = module
        self._read = read

    def __contains__(self, name: str) -> bool:
        return name in self._read

    def get(self, name: str, *dtypes: torch.dtype) -> torch.Tensor:
        """Return a tensor. Raises ModelLoadError if it is absent or of another type."""
        if name not in self._read:
            raise ModelLoadError(f"tensor '{self.module}.{name}' is missing, but the module is quantised: {_AGAIN}")
        tensor = self._read[name]()
        if tensor.dtype not in dtypes:
            allowed = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            found = str(tensor.dtype).removeprefix("torch.")
            raise self.error(name, f"is of type {found}, but must be {allowed}")
        return tensor

    def shaped(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> torch.Tensor:
        """Return a tensor. Raises ModelLoadError if it is absent, of another type or of another shape."""
        tensor = self.get(name, *dtypes)
        if tuple(tensor.shape) != shape:
            raise self.error(name, f"has the shape {list(tensor.shape)}, but the model needs {list(shape)}")
        return tensor

    def scales(self, name: str, *more: torch.dtype) -> torch.Tensor:
        """Return the scales of a weight. Raises ModelLoadError if one is not finite.

        Args:
            more: allowed types besides float16, bfloat16 and float32. uint8 stands for powers of two (e8m0).
        """
        scales = self.get(name, torch.float16, torch.bfloat16, torch.float32, *more)
        if scales.dtype is torch.uint8:
            scales = torch.exp2(scales.float() - 127)
        elif scales.dtype is torch.float8_e8m0fnu:
            scales = scales.float()
        bad = (~torch.isfinite(scales)).nonzero()
        if len(bad):
            raise self.error(name, f"has a scale that is not finite at {bad[0].tolist()}")
        return scales

    def scales_of_groups(self, name: str, out: int, inputs: int, group: int | None) -> torch.Tensor:
        """Return the scales of a weight, [groups, out].

        Args:
            group: inputs of a group, -1 for all. None: as many as the shape says.
        """
        scales = self.scales(name)
        groups = len(scales) if group is None else 1 if group <= 0 else inputs / group
        if scales.shape != (groups, out) or not groups or inputs % groups:
            wanted = "a part of the inputs" if group is None else f"{inputs} / {max(group, 1)}"
            raise self.error(name, f"has the shape {list(scales.shape)}, but the model needs [{wanted}, {out}]")
        return scales

    def order(self, name: str, groups: int, inputs: int) -> torch.Tensor | None:
        """Return the input for each place after sorting inputs by their group: int32 [inputs]. None: already sorted.

        Raises:
            ModelLoadError: a group does not exist, or groups differ in size.
        """
        group_of = self.shaped(name, (inputs,), torch.int32)
        if group_of.min() < 0 or group_of.max() >= groups:
            bad = group_of[(group_of < 0) | (group_of >= groups)][0]
            raise self.error(name, f"has the group {int(bad)}, but there are {groups} groups")
        sizes = torch.bincount(group_of, minlength=groups)
        if bool((sizes != inputs // groups).any()):
            raise self.error(name, f"has groups of {int(sizes.min())} to {int(sizes.max())} inputs: all must be equal")
        order = torch.argsort(group_of, stable=True).int()
        return None if torch.equal(order, torch.arange(inputs, dtype=torch.int32)) else order

    def error(self, name: str, why: str) -> ModelLoadError:
        """Return the error for a tensor that cannot be used."""
        return ModelLoadError(f"tensor '{self.module}.{name}' {why}: {_AGAIN}")
