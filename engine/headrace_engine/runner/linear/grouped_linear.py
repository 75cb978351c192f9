"""Linear layers and embeddings whose weights stay in groups of few bits.

In bfloat16, products are computed by integers. Inputs are rounded with a scale for each 32: to 8 bits for GGUF files,
as in llama.cpp, and to 16 bits for formats that only quantise weights. In float32, weights are
unpacked panel by panel. Results equal those of `NativeLinear` on the dequantised weights.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Self

import torch
from torch import nn

from headrace_engine.runner.linear import native_linear
from headrace_engine.runner.linear.grouped_weight import GroupedWeight
from headrace_engine.runner.linear.native_linear import LinearArgs, NativeLinear, WeightSegment
from headrace_engine.runner.linear.prepared_linear import PreparedLinear, QuantisedLinear
from headrace_engine.runner.native import native_library
from headrace_engine.system.openmp import spin_count

_INTEGERS, _UNPACKED, _INTEGERS_FOR_FEW = 1, 2, 3


def supported(dtype: torch.dtype) -> bool:
    """Whether this processor computes products of grouped weights by the kernels here."""
    return native_linear.preferred(dtype) and bool(native_linear.library().headrace_has_grouped())


def reason_to_dequantise(dtype: torch.dtype) -> str | None:
    """Return why this machine cannot keep weights packed; None if it can."""
    if supported(dtype):
        return None
    return f"this machine has no compiled kernels for packed weights in {str(dtype).removeprefix('torch.')}"


class GroupedLinear(NativeLinear, QuantisedLinear):
    """A linear layer whose weight has one or more segments of outputs, each of its own format.

    Args:
        weights: the segments, in the order of the outputs.
        bias: [out_features], or None. It may be loaded later.
        dtype: the type of inputs and outputs.
        batch_invariant: compute any number of rows by integers. Otherwise the matrix tiles of a processor compute steps
            of 32 rows and more from unpacked weights, which is faster and rounds no inputs: of 16 rows and more
            where inputs are rounded to 16 bits.
    """

    def __init__(
        self, weights: Sequence[GroupedWeight], bias: torch.Tensor | None, dtype: torch.dtype, *, batch_invariant: bool
    ) -> None:
        PreparedLinear.__init__(self, torch.empty(0), bias)
        self.weights = tuple(weights)
        self.in_features = weights[0].in_features
        self.out_features = sum(weight.out_features for weight in weights)
        self.batch_invariant = batch_invariant
        self.weight_reads = 0
        self.num_bytes = sum(weight.strips.nbytes for weight in weights)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._dtype = dtype
        self._result = native_linear.result_of(self.gated)
        self._width = self.out_features // 2 if self.gated else self.out_features
        self._made_args: LinearArgs | None = None

    def dense(self) -> torch.Tensor:
        return torch.cat([weight.dense(self._dtype) for weight in self.weights])

    def _own_args(self) -> LinearArgs:
        if self._made_args is None:  # the bias is known only after loading
            self._made_args = self._make_args()
        return self._made_args

    def _make_args(self) -> LinearArgs:
        driver = _UNPACKED
        if self._dtype is torch.bfloat16:
            driver = _INTEGERS if self.batch_invariant else _INTEGERS_FOR_FEW
        self._segments = (WeightSegment * len(self.weights))(
            *(
                WeightSegment(weight.strips.data_ptr(), weight.format.number, weight.out_features)
                for weight in self.weights
            )
        )
        return LinearArgs(
            dtype=native_library.DTYPES[self._dtype],
            spins=spin_count(os.environ),
            in_features=self.in_features,
            out_features=self.out_features,
            driver=driver,
            num_segments=len(self.weights),
            input_bytes=max(weight.input_bytes for weight in self.weights),
            weight=self.weights[0].strips.data_ptr(),
            segments=ctypes.addressof(self._segments),
            bias=None if self.bias is None else self.bias.data_ptr(),
            order=None if self.weights[0].inputs is None else self.weights[0].inputs.data_ptr(),
        )

    def mergeable_with(self, other: QuantisedLinear) -> bool:
        """Whether the inputs of both weights are in the same order."""
        if not isinstance(other, GroupedLinear):
            return False
        order, others = self.weights[0].inputs, other.weights[0].inputs
        return order is others or (order is not None and others is not None and torch.equal(order, others))

    @classmethod
    def merged(cls, layers: Sequence[QuantisedLinear], bias: torch.Tensor | None) -> Self:
        """Return one layer as `QuantisedLinear.merged` does. The weights are shared."""
        own = [layer for layer in layers if isinstance(layer, GroupedLinear)]
        weights = [weight for layer in own for weight in layer.weights]
        return cls(weights, bias, own[0]._dtype, batch_invariant=own[0].batch_invariant)

    def halves(self) -> list["GroupedLinear"]:
        """Return the layers of the first and the last half of the outputs, without biases. Weights are shared.

        Raises:
            ValueError: the weight cannot be divided there.
        """
        [weight] = self.weights
        middle = weight.out_features // 2
        parts = (weight.part(0, middle), weight.part(middle, weight.out_features))
        return [GroupedLinear([part], None, self._dtype, batch_invariant=self.batch_invariant) for part in parts]


class GroupedGatedLinear(GroupedLinear):
    """Merged gate and up projections, without biases: [rows, in_features] -> activation of gate * up."""

    gated = True


class GroupedEmbedding(nn.Embedding):
    """An embedding whose rows are dequantised when they are read. Made by `replace_embedding`."""

    grouped: GroupedWeight
    grouped_dtype: torch.dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the name in nn.Embedding
        """[...] -> [..., embedding_dim]."""
        ids = input.reshape(-1).long()
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(f"token ids must be from 0 to {self.num_embeddings - 1}, got {ids.min()} to {ids.max()}")
        return self.grouped.rows(ids, self.grouped_dtype).view(*input.shape, -1)


def _grouped_class(kind: type[nn.Embedding]) -> type[nn.Embedding]:
    """Return a subclass of `kind` that reads rows from a grouped weight where `kind` calls `nn.Embedding`."""
    if kind is nn.Embedding:
        return GroupedEmbedding
    return type(f"Grouped{kind.__name__}", (kind, GroupedEmbedding), {})


def replace_embedding(module: nn.Embedding, weight: GroupedWeight, dtype: torch.dtype) -> None:
    """Let an embedding read its rows from a grouped weight. What its class adds to `nn.Embedding` stays.

    Its `weight` keeps type and shape and has no memory: any computation with it fails.
    """
    del module.weight
    placeholder = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device="meta")
    placeholder._is_hf_initialized = True  # type: ignore[attr-defined]  # the module's buffers are still to be initialised
    module.__dict__["weight"] = placeholder
    module.grouped, module.grouped_dtype = weight, dtype  # type: ignore[assignment]
    module.__class__ = _grouped_class(type(module))


def grouped_weights(model: nn.Module) -> list[GroupedWeight]:
    """Return the grouped weights of a model. One that several modules share occurs once."""
    found: dict[int, GroupedWeight] = {}
    for module in model.modules():
        own = getattr(module, "weights", ()) if isinstance(module, GroupedLinear) else ()
        if isinstance(module, GroupedEmbedding):
            own = (module.grouped,)
        found.update((id(weight), weight) for weight in own)
    return list(found.values())
