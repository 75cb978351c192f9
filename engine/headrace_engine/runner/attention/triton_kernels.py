"""Triton kernels of paged attention: one family for prefill, decode and both in one step.

After the unified kernel of vLLM (arXiv 2511.11581). The queries of one K/V head are the rows of one matrix, so
grouped-query attention does not repeat keys. The softmax is online, in float32. If there are only a few long sequences,
their keys are split, and a second kernel combines the parts. Grids depend only on the shapes of tensors, so a launch
can be captured in a CUDA graph.

    rows of a program: 2 tokens of a sequence, 3 query heads for each K/V head, BLOCK_M 8:
        (t0 h0) (t0 h1) (t0 h2) (t1 h0) (t1 h1) (t1 h2)  -  -

Scores are base 2 logarithms, because the hardware computes exp2.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _find_sequence(query_start_ptr, program, num_seqs, BLOCK_Q: tl.constexpr):
    """Return the sequence of a program. Sequence i has the programs from query_start[i] // BLOCK_Q + i on."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // BLOCK_Q + middle <= program:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def paged_attention_kernel(
    output_ptr,  # [tokens, heads, V_DIM]; or, of SPLITS > 1, [tokens, heads, SPLITS, BLOCK_V] float32, not yet divided
    max_ptr,  # [tokens, heads, SPLITS] float32: maximum score of each split
    denominator_ptr,  # [tokens, heads, SPLITS] float32: denominator relative to that maximum
    query_ptr,  # [tokens, heads, K_DIM]
    k_cache_ptr,  # [blocks, kv_heads, BLOCK_SIZE, K_DIM], of the queries' type, or bfloat16 or float8e4nv
    v_cache_ptr,  # [blocks, kv_heads, BLOCK_SIZE, V_DIM]
    query_start_ptr,
    seq_lens_ptr,
    table_rows_ptr,
    block_table_ptr,
    sinks_ptr,
    num_seqs,
    scale,
    softcap,
    query_token_stride,
    query_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if ONE_TOKEN:  # each sequence has one token in this step: no search
        seq = program
        query_block = 0
    else:
        seq = _find_sequence(query_start_ptr, program, num_seqs, BLOCK_Q)
        query_block = program - (tl.load(query_start_ptr + seq) // BLOCK_Q + seq)
    query_first = tl.load(query_start_ptr + seq)
    num_queries = tl.load(query_start_ptr + seq + 1) - query_first
    first_token = query_block * BLOCK_Q
    if first_token >= num_queries:
        return
    past = tl.load(seq_lens_ptr + seq) - num_queries
    table_ptr = block_table_ptr + tl.load(table_rows_ptr + seq).to(tl.int64) * table_stride

    rows = tl.arange(0, BLOCK_M)
    token = first_token + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row_ok = (rows < BLOCK_Q * GROUP) & (token < num_queries)
    query_row = (query_first + token).to(tl.int64)
    position = past + token
    k_dims = tl.arange(0, BLOCK_K)
    v_dims = tl.arange(0, BLOCK_V)
    query = tl.load(
        query_ptr + query_row[:, None] * query_token_stride + head[:, None] * query_head_stride + k_dims[None, :],
        mask=row_ok[:, None] & (k_dims < K_DIM)[None, :],
        other=0.0,
    )
    if WIDEN:  # Triton's interpreter would multiply the bits of bfloat16. Products in float32 are exact
        query = query.to(tl.float32)

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if HAS_SINKS:
        if split == 0:
            running_max = tl.load(sinks_ptr + head, mask=row_ok, other=0.0).to(tl.float32) * _LOG2_E
            denominator = denominator + 1.0

    # Keys that any row of this program sees, in whole tiles, and the part of this split.
    end = past + tl.minimum(first_token + BLOCK_Q, num_queries)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(past + first_token - WINDOW + 1, 0)
    first_tile = begin // TILE
    end_tile = (end + TILE - 1) // TILE
    if SPLITS > 1:
        share = (end_tile - first_tile + SPLITS - 1) // SPLITS
        first_tile = first_tile + split * share
        end_tile = tl.minimum(first_tile + share, end_tile)

    for tile in range(first_tile, end_tile):
        keys = tile * TILE + tl.arange(0, TILE)
        key_ok = keys < end
        if WINDOW > 0:
            key_ok = key_ok & (keys >= begin)
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=key_ok, other=0).to(tl.int64)
        cache_row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        key = tl.load(
            k_cache_ptr + cache_row[None, :] * K_DIM + k_dims[:, None],
            mask=(k_dims < K_DIM)[:, None] & key_ok[None, :],
            other=0.0,
        )
        key = key.to(query_ptr.dtype.element_ty)  # from the type of the cache
        if WIDEN:
            key = key.to(tl.float32)
        scores = tl.dot(query, key, input_precision="ieee")
        if HAS_SOFTCAP:
            # softcap * tanh(scores * scale / softcap), by an exp that cannot overflow
            ratio = scores * (scale / softcap)
            small = tl.exp2(tl.abs(ratio) * (-2.0 * _LOG2_E))
            bounded = (1.0 - small) / (1.0 + small)
            scores = tl.where(ratio < 0, -bounded, bounded) * (softcap * _LOG2_E)
        else:
            scores = scores * (scale * _LOG2_E)
        visible = keys[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible & row_ok[:, None], scores, float("-inf"))

        new_max = tl.maximum(running_max, tl.max(scores, 1))
        # A row without a visible key so far: minus infinity minus itself would be NaN.
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - reference[:, None])
        rescale = tl.exp2(running_max - reference)
        denominator = denominator * rescale + tl.sum(weights, 1)
        value = tl.load(
            v_cache_ptr + cache_row[:, None] * V_DIM + v_dims[None, :],
            mask=key_ok[:, None] & (v_dims < V_DIM)[None, :],
            other=0.0,
        )
        value = value.to(query_ptr.dtype.element_ty)
        weights = weights.to(value.dtype)
        if WIDEN:
            weights = weights.to(tl.float32)
            value = value.to(tl.float32)
        accumulator = tl.dot(weights, value, accumulator * rescale[:, None], input_precision="ieee")
        running_max = new_max

    output_row = query_row * (NUM_KV_HEADS * GROUP) + head
    if SPLITS > 1:
        output_row = output_row * SPLITS + split
        tl.store(output_ptr + output_row[:, None] * BLOCK_V + v_dims[None, :], accumulator, mask=row_ok[:, None])
        tl.store(max_ptr + output_row, running_max, mask=row_ok)
        tl.store(denominator_ptr + output_row, denominator, mask=row_ok)
    else:
        # A padding row has no visible key: it becomes 0, not 0 / 0.
        accumulator = accumulator / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
        tl.store(
            output_ptr + output_row[:, None] * V_DIM + v_dims[None, :],
            accumulator.to(output_ptr.dtype.element_ty),
            mask=row_ok[:, None] & (v_dims < V_DIM)[None, :],
        )


@triton.jit
def join_splits_kernel(
    output_ptr,  # [tokens, heads, V_DIM]
    accumulator_ptr,  # [tokens, heads, SPLITS, BLOCK_V]
    max_ptr,  # [tokens, heads, SPLITS]
    denominator_ptr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Combine the splits of a token and head: weight them by their maximum scores, and divide."""
    output_row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    v_dims = tl.arange(0, BLOCK_V)
    running_max = tl.load(max_ptr + output_row * SPLITS + splits)
    overall_max = tl.max(running_max, 0)
    weights = tl.exp2(running_max - tl.where(overall_max == float("-inf"), 0.0, overall_max))
    denominator = tl.sum(tl.load(denominator_ptr + output_row * SPLITS + splits) * weights, 0)
    accumulator = tl.load(accumulator_ptr + (output_row * SPLITS + splits)[:, None] * BLOCK_V + v_dims[None, :])
    joined = tl.sum(accumulator * weights[:, None], 0) / tl.where(denominator == 0.0, 1.0, denominator)
    tl.store(output_ptr + output_row * V_DIM + v_dims, joined.to(output_ptr.dtype.element_ty), mask=v_dims < V_DIM)


# Rounding is explicit arithmetic on bits. The casts of the interpreter truncate, overflow to NaN and convert NaN to
# numbers, and the tests must check the code that runs on the device.


@triton.jit
def _nearest_e4m3(numbers):
    """Round float32 to 4 bits of exponent and 3 bits of mantissa, ties to even, at most 448."""
    bits = numbers.to(tl.int32, bitcast=True)
    is_number = numbers == numbers
    magnitude = tl.where(is_number, tl.minimum(tl.abs(numbers), 448.0), 0.0)
    power = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Adding 2^23 times the distance between adjacent numbers rounds to that distance.
    scale = tl.maximum(power, 0.015625) * 1048576.0
    nearest = (magnitude + scale) - scale
    # From 2^-6 on, the bits of both types differ by a shift and the bias. Below, adjacent numbers are 2^-9 apart.
    normal = (nearest.to(tl.int32, bitcast=True) >> 20) - 960
    kept = tl.where(nearest < 0.015625, (nearest * 512.0).to(tl.int32), normal)
    kept = tl.where(is_number, kept, 0x7F) | ((bits >> 24) & 0x80)
    return kept.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _nearest_bfloat16(numbers):
    """Round float32 to bfloat16, which is its upper half, ties to even."""
    bits = numbers.to(tl.int32, bitcast=True)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(numbers == numbers, kept, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _as_kept(numbers, kept: tl.constexpr):
    """Round to the type of the cache, unless it is the type of the values."""
    if kept == tl.float8e4nv:
        numbers = _nearest_e4m3(numbers.to(tl.float32))
    elif kept == tl.bfloat16 and numbers.dtype == tl.float32:
        numbers = _nearest_bfloat16(numbers)
    return numbers


@triton.jit(do_not_specialize=["num_tokens"])
def write_kv_kernel(
    key_ptr,  # [tokens, kv_heads, K_DIM]
    value_ptr,  # [tokens, kv_heads, V_DIM]
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    num_tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Write K/V of BLOCK_TOKENS tokens of one head. A token with a negative slot is padding."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1)
    is_kept = (slot >= 0)[:, None]
    cache_row = ((slot // BLOCK_SIZE) * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    k_dims = tl.arange(0, BLOCK_K)[None, :]
    v_dims = tl.arange(0, BLOCK_V)[None, :]
    k_ok = is_kept & (k_dims < K_DIM)
    v_ok = is_kept & (v_dims < V_DIM)
    key = tl.load(key_ptr + token[:, None] * key_token_stride + head * key_head_stride + k_dims, mask=k_ok)
    value = tl.load(value_ptr + token[:, None] * value_token_stride + head * value_head_stride + v_dims, mask=v_ok)
    key = _as_kept(key, k_cache_ptr.dtype.element_ty)
    value = _as_kept(value, v_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + cache_row[:, None] * K_DIM + k_dims, key, mask=k_ok)
    tl.store(v_cache_ptr + cache_row[:, None] * V_DIM + v_dims, value, mask=v_ok)
