"""Triton kernels for the operations between matrix products. Each kernel reads and writes its data once.

Grids depend only on the shapes of tensors, so a launch can be captured in a CUDA graph. Arithmetic is float32. Results
are rounded to the type of the data at the same places as in transformers, so that bfloat16 gives the same numbers.

A kernel that changes data in place stores the result after a barrier. Triton may repeat a small load for threads that
need the elements in another order. Without the barrier, the repeated load could read a result of another thread.
"""

import triton
import triton.language as tl


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def add_rms_norm_kernel(
    out_ptr,  # [rows, FEATURES], like hidden and delta
    hidden_ptr,
    delta_ptr,
    weight_ptr,
    eps,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """A program computes a row: hidden += delta, out = rms_norm(hidden) * weight."""
    DTYPE: tl.constexpr = hidden_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * FEATURES
    features = tl.arange(0, BLOCK)
    inside = features < FEATURES
    x = tl.load(hidden_ptr + row + features, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row + features, mask=inside, other=0.0).to(tl.float32)
        x = _rounded(x + delta, DTYPE)
        tl.debug_barrier()
        tl.store(hidden_ptr + row + features, x.to(DTYPE), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / FEATURES + eps)
    weight = tl.load(weight_ptr + features, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + features, (_rounded(x * scale, DTYPE) * weight).to(DTYPE), mask=inside)


@triton.jit
def _head_norm(x, scale, is_query, q_weight_ptr, k_weight_ptr, dims, inside, DTYPE: tl.constexpr):
    q_weight = tl.load(q_weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    return _rounded(_rounded(x * scale, DTYPE) * tl.where(is_query, q_weight, k_weight), DTYPE)


@triton.jit
def norm_rope_kernel(
    qkv_ptr,  # [tokens, at least NUM_HEADS * HEAD_DIM]; the first NUM_HEADS heads of each row are changed in place
    q_weight_ptr,  # [HEAD_DIM]
    k_weight_ptr,
    cosine_ptr,  # [tokens, 2 * HALF]
    sine_ptr,
    eps,
    token_stride,
    cosine_stride,
    sine_stride,
    Q_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """A program computes some heads of a token.

    A head has HALF elements, HALF elements that are rotated together with the first ones, and the rest.
    """
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    is_query = heads < Q_HEADS
    half = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = half < HALF
    turns = (heads < NUM_HEADS) & in_half
    first_ptr = qkv_ptr + token * token_stride + heads * HEAD_DIM + half
    first = tl.load(first_ptr, mask=turns, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=turns, other=0.0).to(tl.float32)
    if HAS_NORM:
        dims = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        in_rest = dims < HEAD_DIM
        rest_ptr = qkv_ptr + token * token_stride + heads * HEAD_DIM + dims
        rest = tl.load(rest_ptr, mask=(heads < NUM_HEADS) & in_rest, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, axis=1) + tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = _head_norm(first, scale, is_query, q_weight_ptr, k_weight_ptr, half, in_half, DTYPE)
        second = _head_norm(second, scale, is_query, q_weight_ptr, k_weight_ptr, half + HALF, in_half, DTYPE)
        rest = _head_norm(rest, scale, is_query, q_weight_ptr, k_weight_ptr, dims, in_rest, DTYPE)
    cosine_ptr += token * cosine_stride + half
    sine_ptr += token * sine_stride + half
    first_cosine = tl.load(cosine_ptr, mask=in_half, other=0.0).to(tl.float32)
    first_sine = tl.load(sine_ptr, mask=in_half, other=0.0).to(tl.float32)
    second_cosine = tl.load(cosine_ptr + HALF, mask=in_half, other=0.0).to(tl.float32)
    second_sine = tl.load(sine_ptr + HALF, mask=in_half, other=0.0).to(tl.float32)
    rotated_first = _rounded(first * first_cosine, DTYPE) - _rounded(second * first_sine, DTYPE)
    rotated_second = _rounded(second * second_cosine, DTYPE) + _rounded(first * second_sine, DTYPE)
    tl.debug_barrier()
    if HAS_NORM:
        tl.store(rest_ptr, rest.to(DTYPE), mask=(heads < NUM_HEADS) & in_rest)
    tl.store(first_ptr, rotated_first.to(DTYPE), mask=turns)
    tl.store(first_ptr + HALF, rotated_second.to(DTYPE), mask=turns)


@triton.jit
def gate_kernel(
    out_ptr,  # [rows, FEATURES]
    gate_up_ptr,  # [rows, gate: FEATURES | up: FEATURES]
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
):
    """A program computes BLOCK features of a row: SiLU, or the tanh form of GELU, of the gate, times up."""
    DTYPE: tl.constexpr = gate_up_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * FEATURES
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = features < FEATURES
    gate = tl.load(gate_up_ptr + 2 * row + features, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + 2 * row + FEATURES + features, mask=inside, other=0.0).to(tl.float32)
    # 0.5 (1 + tanh(y)) = sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x^3)
    logit = gate * (gate * gate * 7.13548163e-2 + 1.59576912) if GELU else gate
    power = tl.exp(-tl.abs(logit))  # never overflows
    activated = _rounded(gate * tl.where(gate < 0, power, 1.0) / (1.0 + power), DTYPE)
    tl.store(out_ptr + row + features, (activated * up).to(DTYPE), mask=inside)
