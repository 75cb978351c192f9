"""Compiles the Triton kernels for compute capability 9.0, as the engine launches them; needs no GPU.

Attention's, or with the argument `elementwise` those of the passes between matrix products, or with `quantised` those
of quantised weights. Prints a line for each: its
name, and the bytes of shared memory that it takes. The kernels' calls are recorded on the CPU, so what is compiled here
has the very constants that a launch has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention_cases import Case, Problem
from headrace_engine.runner.attention import triton_kernels
from headrace_engine.runner.attention.triton_backend import TritonBackend
from headrace_engine.runner.elementwise import triton_kernels as elementwise_kernels
from headrace_engine.runner.elementwise import triton_ops
from headrace_engine.runner.elementwise.ops import Activation
from headrace_engine.runner.linear import triton_kernels as linear_kernels
from headrace_engine.runner.linear import triton_quantised_linear
from headrace_engine.runner.linear.quantised_weight import CodeKind, QuantisedWeight
from headrace_engine.runner.linear.triton_quantised_linear import TritonQuantisedLinear

HOPPER = GPUTarget("cuda", 90, 32)
HOPPER_PROCESSORS = 132
_LAUNCH_OPTIONS = ("num_warps", "num_stages")
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}

LLAMA_8B = {"kv_heads": 8, "group": 4, "k_dim": 128, "v_dim": 128, "block_size": 32}
CASES = {
    "decode_split": Problem(((40, 1),), **LLAMA_8B),
    "decode": Problem(((40, 1),) * 64, **LLAMA_8B),
    "prefill": Problem(((0, 70), (40, 1)), **LLAMA_8B),
    "prefill_with_everything": Problem(
        ((0, 70),), kv_heads=1, group=7, k_dim=80, v_dim=256, window=33, softcap=50.0, sinks=True
    ),
}


class Recorder:
    """Stands in for a kernel: takes the launch and computes nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, _grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launches.append((args, options))


def compile_launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What Triton would make of the launch on the device: its types, and which numbers are multiples of 16."""
    signature: dict[str, str] = {}
    constants = {name: value for name, value in options.items() if name not in _LAUNCH_OPTIONS}
    attributes = {}
    for index, name in enumerate(kernel.arg_names):
        value = constants.get(name, args[index] if index < len(args) else None)
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if signature[name] != "constexpr" and aligned and not kernel.params[index].do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    launch = {name: options[name] for name in _LAUNCH_OPTIONS if name in options}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=HOPPER, options=launch)


@contextmanager
def compiled_at_the_end(module: Any, *names: str) -> Iterator[None]:
    """Record the launches of these kernels in the block, then compile each and print its line."""
    recorders = {name: Recorder(getattr(module, name)) for name in names}
    for name, recorder in recorders.items():
        setattr(module, name, recorder)
    yield
    for name, recorder in recorders.items():
        setattr(module, name, recorder.kernel)
    for name, recorder in recorders.items():
        for args, options in recorder.launches:
            compiled = compile_launch(recorder.kernel, args, options)
            assert compiled.asm["cubin"]
            sys.stdout.write(f"{name} {compiled.metadata.shared}\n")


def elementwise() -> None:
    """The passes between the products of a layer of Qwen3-8B's shape, with and without head norms."""
    hidden, qkv, gate_up, cosine = (torch.zeros(64, size, dtype=torch.bfloat16) for size in (4096, 6144, 24576, 128))
    heads: dict[str, Any] = {"q_heads": 32, "k_heads": 8, "head_dim": 128, "cosine": cosine, "sine": cosine}
    with compiled_at_the_end(elementwise_kernels, "add_rms_norm_kernel", "norm_rope_kernel", "gate_kernel"):
        for delta in (None, hidden):
            triton_ops.add_rms_norm(hidden, delta, hidden[0].float(), 1e-5)
        for weight in (None, cosine[0].float()):
            triton_ops.norm_rope(qkv, **heads, q_weight=weight, k_weight=weight, eps=1e-6)
        triton_ops.gate(gate_up, Activation.SILU)


def quantised() -> None:
    """Weights of each kind in the shape of Llama-3.1-8B's attention, with 1, 64 and many rows."""
    triton_quantised_linear.supports = lambda *_: True
    scales = torch.ones(4096, 32)
    with compiled_at_the_end(linear_kernels, "quantised_linear_kernel", "dequantise_kernel"):
        for kind in CodeKind:
            codes = torch.zeros(4096, 4096, dtype=torch.float8_e4m3fn if kind is CodeKind.FLOAT8 else torch.uint8)
            zeros = None if kind is CodeKind.FLOAT8 else scales.short()
            layer = TritonQuantisedLinear(QuantisedWeight(kind, codes, scales, zeros, 128), None, torch.bfloat16)
            for rows in (1, 64, 2048):
                layer(torch.zeros(rows, 4096, dtype=torch.bfloat16))


def attention(
    cases: dict[str, Problem],
    suffix: str = "",
    *,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
) -> None:
    names = ("paged_attention_kernel", "join_splits_kernel", "write_kv_kernel")
    done = set()
    for case_name, problem in cases.items():
        recorders = {name: Recorder(getattr(triton_kernels, name)) for name in names}
        for name, recorder in recorders.items():
            setattr(triton_kernels, name, recorder)
        case = Case(problem, dtype, cache_dtype=cache_dtype)
        case.compute(TritonBackend(case.spec(), torch.device("cpu"), HOPPER_PROCESSORS))
        for name, recorder in recorders.items():
            setattr(triton_kernels, name, recorder.kernel)
            if recorder.launches and (name == names[0] or name not in done):
                compiled = compile_launch(recorder.kernel, *recorder.launches[-1])
                assert compiled.asm["cubin"]
                sys.stdout.write(f"{case_name if name == names[0] else name}{suffix} {compiled.metadata.shared}\n")
                done.add(name)


def main() -> None:
    attention(CASES)
    attention(CASES, "_fp8", cache_dtype=torch.float8_e4m3fn)
    decode = {"decode_split": CASES["decode_split"]}
    attention(decode, "_float32_kept_in_bfloat16", dtype=torch.float32, cache_dtype=torch.bfloat16)


if __name__ == "__main__":
    {"elementwise": elementwise, "quantised": quantised}.get(sys.argv[-1], main)()
