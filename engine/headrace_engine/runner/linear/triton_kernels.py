"""Triton kernels for weights in integers or 8-bit floats with scales, in the layout of `quantised_weight.py`.

A weight is dequantised in float32 and rounded once to the type of the inputs, so each has the value that a dequantised
layer has. Sums are float32.
"""

import triton
import triton.language as tl


@triton.jit
def _rounded(values, DTYPE: tl.constexpr, WIDEN: tl.constexpr):
    """Round float32 to the type of the inputs, to the nearest value, ties to even."""
    if WIDEN and tl.bfloat16 == DTYPE:  # Triton's interpreter cuts off, and would multiply the bits of bfloat16
        bits = values.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return values.to(DTYPE)


@triton.jit
def _inputs_of(places, half, IS_INT4: tl.constexpr, PAIR_DISTANCE: tl.constexpr):
    """Return the input of each byte of a row; in 4 bits, that of its low half (0) or its high half (1)."""
    if IS_INT4:
        return places // PAIR_DISTANCE * (2 * PAIR_DISTANCE) + half * PAIR_DISTANCE + places % PAIR_DISTANCE
    return places


@triton.jit
def _weights(
    codes,  # uint8 [outputs, inputs]
    half,
    scales_ptr,
    zeros_ptr,
    outputs,
    inputs,
    inside,  # [outputs, inputs]
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_INT4: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """Return the weights in float32. Outside they are zero."""
    if IS_FLOAT:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif IS_INT4:
        values = ((codes >> (4 * half)) & 15).to(tl.float32)
    else:
        values = codes.to(tl.float32)
    groups = outputs.to(tl.int64)[:, None] * NUM_GROUPS + (inputs // GROUP)[None, :]
    if HAS_ZEROS:
        values -= tl.load(zeros_ptr + groups, mask=inside, other=0).to(tl.float32)
    return values * tl.load(scales_ptr + groups, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def quantised_linear_kernel(
    out_ptr,  # [rows, OUTPUTS]
    x_ptr,  # [rows, INPUTS]
    codes_ptr,  # uint8 [OUTPUTS, ROW_BYTES]
    scales_ptr,  # float32 [OUTPUTS, NUM_GROUPS]
    zeros_ptr,  # int16, like scales
    bias_ptr,  # [OUTPUTS]
    num_rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PAIR_DISTANCE: tl.constexpr,
    IS_INT4: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """A program computes BLOCK_OUTPUTS outputs of BLOCK_ROWS rows."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outputs_inside, rows_inside = outputs < OUTPUTS, rows < num_rows
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * INPUTS
    code_rows = codes_ptr + outputs.to(tl.int64)[:, None] * ROW_BYTES
    sums = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    for first in range(0, ROW_BYTES, BLOCK_BYTES):
        places = first + tl.arange(0, BLOCK_BYTES)
        codes = tl.load(
            code_rows + places[None, :], mask=outputs_inside[:, None] & (places < ROW_BYTES)[None, :], other=0
        )
        for half in tl.static_range(2 if IS_INT4 else 1):
            inputs = _inputs_of(places, half, IS_INT4, PAIR_DISTANCE)
            inputs_inside = (inputs < INPUTS)[None, :]
            inside = outputs_inside[:, None] & inputs_inside
            weights = _weights(
                codes, half, scales_ptr, zeros_ptr, outputs, inputs, inside,
                NUM_GROUPS, GROUP, IS_INT4, IS_FLOAT, HAS_ZEROS,
            )  # fmt: skip
            x = tl.load(x_rows + inputs[None, :], mask=rows_inside[:, None] & inputs_inside, other=0.0)
            if WIDEN:
                x = x.to(tl.float32)
            sums = tl.dot(x, tl.trans(_rounded(weights, DTYPE, WIDEN)), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, mask=outputs_inside, other=0.0).to(tl.float32)[None, :]
    out_rows = out_ptr + rows.to(tl.int64)[:, None] * OUTPUTS
    inside = rows_inside[:, None] & outputs_inside[None, :]
    tl.store(out_rows + outputs[None, :], _rounded(sums, DTYPE, WIDEN).to(DTYPE), mask=inside)


@triton.jit
def dequantise_kernel(
    out_ptr,  # [OUTPUTS, INPUTS]
    codes_ptr,  # as above
    scales_ptr,
    zeros_ptr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PAIR_DISTANCE: tl.constexpr,
    IS_INT4: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """A program dequantises BLOCK_BYTES bytes of BLOCK_OUTPUTS outputs."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    places = tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    outputs_inside = (outputs < OUTPUTS)[:, None]
    code_rows = codes_ptr + outputs.to(tl.int64)[:, None] * ROW_BYTES
    codes = tl.load(code_rows + places[None, :], mask=outputs_inside & (places < ROW_BYTES)[None, :], other=0)
    out_rows = out_ptr + outputs.to(tl.int64)[:, None] * INPUTS
    for half in tl.static_range(2 if IS_INT4 else 1):
        inputs = _inputs_of(places, half, IS_INT4, PAIR_DISTANCE)
        inside = outputs_inside & (inputs < INPUTS)[None, :]
        weights = _weights(
            codes, half, scales_ptr, zeros_ptr, outputs, inputs, inside,
            NUM_GROUPS, GROUP, IS_INT4, IS_FLOAT, HAS_ZEROS,
        )  # fmt: skip
        tl.store(out_rows + inputs[None, :], _rounded(weights, DTYPE, WIDEN).to(DTYPE), mask=inside)
