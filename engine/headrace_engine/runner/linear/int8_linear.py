"""Linear layers in 8 bits: weights rounded at load, a scale for each output; inputs at each call, a scale for each row.

The products are sums of integers, exact, by oneDNN's kernels for processors with VNNI instructions. Since every row of
the input has its own scale, no request's result depends on what is computed beside it.
"""

import torch

from headrace_engine.errors import ConfigError
from headrace_engine.runner.elementwise import native_ops
from headrace_engine.runner.linear.prepared_linear import PreparedLinear

_ROWS_HINT = 64  # as in `packed_linear`
_ZERO_POINT = 128  # oneDNN's fast kernels take unsigned inputs only


class Int8Linear(PreparedLinear):
    """Stands for an `nn.Linear` in inference, with an error of about 1 % of the output's norm.

    Args:
        weight: [out_features, in_features].
        bias: [out_features], kept as it is.

    Raises:
        ConfigError: the rows are longer than the kernels take.
    """

    exact = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.out_features, self.in_features = weight.shape
        if self.in_features > native_ops.MOST_FEATURES:
            raise ConfigError(
                f"quantization int8 takes up to {native_ops.MOST_FEATURES} input features, "
                f"a layer has {self.in_features}"
            )
        values = weight.detach().float()
        self._scales = (values.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        levels = (values / self._scales[:, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(levels, [_ROWS_HINT, self.in_features])
        self._zero_points = torch.zeros(self.out_features, dtype=torch.int32)
        self.num_bytes = weight.nbytes  # of what it replaces
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features] of the same type."""
        levels, scales = native_ops.quantise_rows(x.reshape(-1, self.in_features))
        sums: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            *(levels, 1.0, _ZERO_POINT, self._packed, self._scales, self._zero_points, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return native_ops.scale_rows(sums, scales, self._bias, x.dtype).view(*x.shape[:-1], self.out_features)


def check_supported() -> None:
    """Raises ConfigError where int8 products would be slow, wrong or not possible."""
    capabilities = torch.cpu.get_capabilities()
    if not (capabilities.get("avx512_vnni") or capabilities.get("avx_vnni") or capabilities.get("amx_int8")):
        raise ConfigError("quantization int8 needs a processor with VNNI or AMX instructions, which this one lacks")
    try:
        native_ops.library()
    except OSError as error:
        raise ConfigError(f"quantization int8 needs its compiled kernels: {error}") from error
