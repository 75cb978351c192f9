"""Linear layers with weights in oneDNN's own blocked layout, made once at load.

At the few rows of a decode step, oneDNN otherwise reorders the weight on every call. That takes several times
as long as the product itself.
"""

import torch

from headrace_engine.runner.linear.prepared_linear import PreparedLinear

# oneDNN tunes the layout for this number of rows. 64 was the fastest of the values measured for 1 to 512 rows.
_ROWS_HINT = 64


class PackedLinear(PreparedLinear):
    """Replaces an `nn.Linear` in inference. Does not keep the original weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
        self.num_bytes = weight.nbytes
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return packed


def supports(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes this type natively here."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def computes_bfloat16() -> bool:
    """Whether products in bfloat16 are faster here than in float32.

    An x86 processor without instructions for them takes three to four times as long as for float32.
    """
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") != "x86_64":
        return supports(torch.bfloat16)
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("avx_ne_convert"))
