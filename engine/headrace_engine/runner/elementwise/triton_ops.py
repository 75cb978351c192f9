"""`ElementwiseOps` for a GPU, by the kernels of `triton_kernels.py`.

Block sizes are computed, not measured. On the CPU the kernels run in Triton's interpreter, for tests only.
"""

import torch

from headrace_engine.runner.elementwise.ops import Activation

_GATE_BLOCK = 1024
# Elements of queries and keys that one program rotates: several heads share their cosines and sines.
_ROPE_BLOCK = 2048


def add_rms_norm(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta`, if given, to hidden in place. Return the root mean square norm (Zhang and Sennrich 2019)."""
    from headrace_engine.runner.elementwise.triton_kernels import add_rms_norm_kernel

    rows, features = hidden.shape
    out = torch.empty_like(hidden)
    block = _next_power_of_2(features)
    add_rms_norm_kernel[(rows,)](
        out,
        hidden,
        hidden if delta is None else delta,
        weight,
        eps,
        FEATURES=features,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        num_warps=min(16, max(4, block // 512)),
    )
    return out


def add_normed(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Add the root mean square norm of delta to hidden, in place."""
    hidden += add_rms_norm(delta, None, weight, eps)


def norm_rope(
    qkv: torch.Tensor,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    *,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cosine: torch.Tensor | None,
    sine: torch.Tensor | None,
) -> None:
    """Normalise and rotate the queries and keys at the front of each row, in place. See `native_ops.norm_rope`.

    Raises:
        ValueError: only one of queries and keys has a norm, or the weight of a norm is not [head_dim].
    """
    from headrace_engine.runner.elementwise.triton_kernels import norm_rope_kernel

    weights = [weight for weight in (q_weight, k_weight) if weight is not None]
    if len(weights) == 1 or any(weight.shape != (head_dim,) for weight in weights):
        raise ValueError("queries and keys need norms of the size of a head, or none")
    rotary_dim = 0 if cosine is None else cosine.shape[-1]
    num_heads = q_heads + k_heads
    block_heads = min(_next_power_of_2(num_heads), max(1, _ROPE_BLOCK // _next_power_of_2(head_dim)))
    norm_rope_kernel[(qkv.shape[0], -(-num_heads // block_heads))](
        qkv,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        qkv if cosine is None else cosine,
        qkv if sine is None else sine,
        eps,
        qkv.stride(0),
        0 if cosine is None else cosine.stride(0),
        0 if sine is None else sine.stride(0),
        Q_HEADS=q_heads,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=_next_power_of_2(max(1, rotary_dim // 2)),
        BLOCK_REST=_next_power_of_2(max(1, head_dim - rotary_dim)),
        HAS_NORM=bool(weights),
    )


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[tokens, gate | up] -> activation of gate * up, [tokens, half the features] (Shazeer 2020)."""
    from headrace_engine.runner.elementwise.triton_kernels import gate_kernel

    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, features))
    gate_kernel[(rows, -(-features // _GATE_BLOCK))](
        out, gate_up, FEATURES=features, BLOCK=_GATE_BLOCK, GELU=activation is Activation.GELU_TANH
    )
    return out


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
