"""Linear layers in 8 bits.

Weights are rounded at load, with a scale for each output. Inputs are rounded in each call, with a scale for each row.
So the result of a request does not depend on the rest of the batch. The products are exact sums of integers, by
oneDNN's kernels for processors with VNNI instructions.
"""

import torch

from headrace_engine.errors import ConfigError
from headrace_engine.runner.elementwise import native_ops
from headrace_engine.runner.linear.prepared_linear import PreparedLinear

_ROWS_HINT = 64  # see `packed_linear`
_ZERO_POINT = 128  # oneDNN's fast kernels need unsigned inputs


class Int8Linear(PreparedLinear):
    """Replaces an `nn.Linear` in inference, with an error of about 1 % of the norm of the output.

    Args:
        weight: [out_features, in_features].
        bias: [out_features], not rounded.

    Raises:
        ConfigError: the rows are too long for the kernels.
    """

    exact = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.out_features, self.in_features = weight.shape
        if self.in_features > native_ops.MAX_FEATURES:
            raise ConfigError(
                f"quantization int8 takes up to {native_ops.MAX_FEATURES} input features, "
                f"a layer has {self.in_features}"
            )
        values = weight.detach().float()
        self._scales = (values.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        levels = (values / self._scales[:, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(levels, [_ROWS_HINT, self.in_features])
        self._zero_points = torch.zeros(self.out_features, dtype=torch.int32)
        self.num_bytes = weight.nbytes  # size of the original weight
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features] of the same type."""
        levels, scales = native_ops.quantise_rows(x.reshape(-1, self.in_features))
        sums: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            levels,
            1.0,
            _ZERO_POINT,
            self._packed,
            self._scales,
            self._zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return native_ops.scale_rows(sums, scales, self._bias, x.dtype).view(*x.shape[:-1], self.out_features)


def check_supported() -> None:
    """Raise ConfigError if int8 products would be slow, wrong or impossible on this machine."""
    capabilities = torch.cpu.get_capabilities()
    if not (capabilities.get("avx512_vnni") or capabilities.get("avx_vnni") or capabilities.get("amx_int8")):
        raise ConfigError("quantization int8 needs a processor with VNNI or AMX instructions, which this one lacks")
    try:
        native_ops.library()
    except OSError as error:
        raise ConfigError(f"quantization int8 needs its compiled kernels: {error}") from error
