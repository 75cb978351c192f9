"""Triton's paged attention against attention written out in float64, on random shapes.

Without a GPU the kernels run in Triton's interpreter, and are compiled for Hopper besides, which needs no GPU either.
Caches are poisoned with NaN first, as in `test_attention.py`. HEADRACE_TRITON_EXAMPLES asks for more examples.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.attention_cases import Case, Problem
from headrace_engine.runner.attention.backend import AttentionMetadata, AttentionSpec, LayerSpec
from headrace_engine.runner.attention.triton_backend import TritonBackend

pytest.importorskip("triton", reason="Triton is not installed: make test-triton")

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/attention", "engine/headrace_engine/runner/cuda")

FP8 = torch.float8_e4m3fn
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXAMPLES = int(os.environ.get("HEADRACE_TRITON_EXAMPLES", "8"))
several = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

prefills = st.tuples(st.integers(0, 70), st.integers(1, 40))
decodes = st.tuples(st.integers(0, 100), st.just(1))


def problems(sequences: Any) -> Any:
    return st.builds(
        Problem,
        sequences=sequences.map(tuple),
        kv_heads=st.integers(1, 2),
        group=st.sampled_from([1, 2, 3, 4, 7, 8, 16, 20]),
        k_dim=st.sampled_from([8, 64, 80, 96, 128, 192, 256]),
        v_dim=st.sampled_from([24, 64, 80, 96, 128, 256]),
        block_size=st.sampled_from([8, 16, 32, 48]),
        window=st.none() | st.integers(1, 100),
        softcap=st.none() | st.sampled_from([1.0, 20.0, 50.0]),
        sinks=st.booleans(),
        spread=st.sampled_from([0.1, 1.0, 4.0]),
        seed=st.integers(0, 1000),
    )


WIDE: dict[str, Any] = {"k_dim": 128, "v_dim": 128}  # so that a tile has 16 keys, and 100 keys four splits


def compute(case: Case, num_processors: int = 1) -> torch.Tensor:
    return case.compute(TritonBackend(case.spec(), torch.device(DEVICE), num_processors)).double()


@example(Problem(((16, 1), (15, 1), (17, 1)), window=1))
@example(Problem(((64, 33),), window=16, group=3))
@example(Problem(((30, 9),), spread=300.0, group=2))
@given(problems(st.lists(prefills | decodes, min_size=1, max_size=3)))
@several
def test_float32_attention_is_exact_to_rounding(problem: Problem) -> None:
    case = Case(problem, torch.float32, DEVICE)
    if problem.spread > 4:
        # Scores far beyond the range of exp: one key outweighs all others, and the output is its value.
        best = (case.query[0][-1, 0] @ case.key[0][:, 0].T).argmax()
        torch.testing.assert_close(compute(case)[-1, 0], case.value[0][best, 0].double(), atol=1e-4, rtol=1e-4)
    else:
        torch.testing.assert_close(compute(case), case.expected(), atol=2e-5, rtol=2e-5)


@example(Problem(((100, 1), (0, 1), (31, 1)), sinks=True, group=4, **WIDE), 64)
@example(Problem(((100, 1),), window=40, softcap=20.0, sinks=True, **WIDE), 16)
@given(problems(st.lists(decodes, min_size=1, max_size=3)), st.sampled_from([2, 8, 64]))
@several
def test_decoding_sequences_split_along_their_keys_are_joined_exactly(problem: Problem, num_processors: int) -> None:
    case = Case(problem, torch.float32, DEVICE)
    torch.testing.assert_close(compute(case, num_processors), case.expected(), atol=2e-5, rtol=2e-5)


@example(Problem(((37, 20), (90, 1)), kv_heads=2, group=8, k_dim=128, v_dim=128, block_size=32), 1)
@example(Problem(((90, 1), (33, 1)), kv_heads=2, group=4, k_dim=128, v_dim=128, block_size=32), 64)
@given(problems(st.lists(prefills | decodes, min_size=1, max_size=2)), st.sampled_from([1, 64]))
@settings(several, max_examples=max(1, EXAMPLES // 3))
def test_bfloat16_attention_is_right_to_the_rounding_of_weights_and_outputs(
    problem: Problem, num_processors: int
) -> None:
    # Weights are rounded to bfloat16 before they meet the values, as in all flash attention.
    case = Case(problem, torch.bfloat16, DEVICE)
    torch.testing.assert_close(compute(case, num_processors), case.expected(), atol=1e-2, rtol=2**-7)


# (what queries, keys and values come in, what keys and values are kept in)
ROUNDED = [(torch.float32, FP8), (torch.bfloat16, FP8), (torch.float32, torch.bfloat16)]


@example(Problem(((37, 20), (90, 1)), kv_heads=2, group=8, k_dim=128, v_dim=128, block_size=32), ROUNDED[1], 1)
@example(Problem(((90, 1), (33, 1)), kv_heads=2, group=4, k_dim=128, v_dim=128, block_size=32), ROUNDED[0], 64)
@example(Problem(((100, 1), (31, 2)), kv_heads=2, group=4, k_dim=24, v_dim=40), ROUNDED[2], 64)
@given(
    problems(st.lists(prefills | decodes, min_size=1, max_size=2)), st.sampled_from(ROUNDED), st.sampled_from([1, 64])
)
@settings(several, max_examples=max(1, EXAMPLES // 2))
def test_attention_over_rounded_keys_and_values_is_as_exact_as_over_others(
    problem: Problem, dtypes: tuple[torch.dtype, torch.dtype], num_processors: int
) -> None:
    dtype, kept = dtypes
    case = Case(problem, dtype, DEVICE, cache_dtype=kept)
    tolerance = {"atol": 2e-5, "rtol": 2e-5} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 2**-7}
    torch.testing.assert_close(compute(case, num_processors), case.expected(), **tolerance)


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """All of bfloat16, NaN and infinities included; in float32 also the neighbours of these, and what lies between."""
    numbers = torch.arange(1 << 16) << 16
    if dtype is torch.float32:
        numbers = (numbers[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).flatten()
    return numbers.to(torch.int32).view(torch.float32).to(dtype)


@pytest.mark.parametrize(("dtype", "kept"), ROUNDED)
def test_every_number_is_kept_as_the_nearest_one_and_in_8_bits_as_at_most_448(
    dtype: torch.dtype, kept: torch.dtype
) -> None:
    numbers = every_number(dtype)
    tokens = numbers.view(-1, 1, 256).to(DEVICE)
    layer = LayerSpec(num_heads=1, num_kv_heads=1, k_dim=256, v_dim=256)
    spec = AttentionSpec(layers=(layer,), block_size=16, dtype=dtype, cache_dtype=kept)
    backend = TritonBackend(spec, torch.device(DEVICE))
    backend.allocate(1 + len(tokens) // 16)
    backend._write(0, tokens, -tokens, torch.arange(16, 16 + len(tokens), device=DEVICE))
    # torch makes infinity or NaN of what is too large, by version; NaN stays NaN
    expected = (numbers.float().clamp(-448, 448) if kept is FP8 else numbers).to(kept).float()
    for cache, sign in ((backend._k_cache[0], 1), (backend._v_cache[0], -1)):
        torch.testing.assert_close(
            cache[1:].cpu().float().flatten(), sign * expected, atol=0.0, rtol=0.0, equal_nan=True
        )
        assert not cache[0].cpu().float().any()  # the null block


@pytest.mark.parametrize(("dtype", "kept"), ROUNDED)
def test_a_block_takes_what_its_numbers_take_as_they_are_kept(dtype: torch.dtype, kept: torch.dtype) -> None:
    case = Case(Problem(((20, 1),), kv_heads=2, k_dim=24, v_dim=40, block_size=8), dtype, cache_dtype=kept)
    backend = TritonBackend(case.spec(), torch.device("cpu"))
    backend.allocate(5)
    assert backend.bytes_per_block == 8 * 2 * (24 + 40) * kept.itemsize
    assert sum(cache.nbytes for cache in (*backend._k_cache, *backend._v_cache)) == 5 * backend.bytes_per_block


def padded(metadata: AttentionMetadata, count: int) -> AttentionMetadata:
    """As a graph of a fixed size sees it: `count` rows more, with no keys and nowhere to write."""
    last = metadata.query_start[-1:]
    return AttentionMetadata(
        query_start=torch.cat([metadata.query_start, last + torch.arange(1, count + 1, device=DEVICE)]).to(torch.int32),
        seq_lens=torch.nn.functional.pad(metadata.seq_lens, (0, count)),
        table_rows=torch.nn.functional.pad(metadata.table_rows, (0, count), value=len(metadata.block_table) - 1),
        block_table=metadata.block_table,
        slot_mapping=torch.nn.functional.pad(metadata.slot_mapping, (0, count), value=-1),
        max_query_len=1,
    )


@pytest.mark.parametrize("num_processors", [1, 64])
def test_padding_rows_change_nothing_and_become_zeros(num_processors: int) -> None:
    case = Case(Problem(((40, 1), (17, 1)), kv_heads=2, group=2), torch.float32, DEVICE)
    backend = TritonBackend(case.spec(), torch.device(DEVICE), num_processors)
    case.compute(backend)
    spans = [(40, 41), (17, 18)]
    tensors = [case.packed(own, spans) for own in (case.query, case.key, case.value)]
    before = [cache.clone() for cache in (*backend._k_cache, *backend._v_cache)]
    junk = [torch.cat([own, torch.full_like(own[:1], float("nan")).expand(3, -1, -1)]) for own in tensors]
    output = backend.forward(0, *junk, padded(case.metadata(spans), 3), scale=case.scale, softcap=None, sinks=None)
    torch.testing.assert_close(output[:2].cpu().double(), case.expected(), atol=2e-5, rtol=2e-5)
    assert not output[2:].any()
    for old, new in zip(before, (*backend._k_cache, *backend._v_cache), strict=True):
        assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0))


def test_a_layer_without_keys_of_its_own_reads_the_ones_of_its_source() -> None:
    case = Case(Problem(((20, 5), (33, 2)), kv_heads=2, group=2, k_dim=24, v_dim=40), torch.float32, DEVICE)
    (own,) = case.spec().layers
    spec = AttentionSpec(layers=(own, replace(own, kv_source=0, window=9)), block_size=16, dtype=torch.float32)
    backend = TritonBackend(spec, torch.device(DEVICE))
    case.compute(backend)
    now = [(past, past + new) for past, new in case.problem.sequences]
    nothing = [torch.full((7, 2, dim), float("nan"), device=DEVICE) for dim in (24, 40)]
    query = case.packed(case.query, now)
    output = backend.forward(1, query, *nothing, case.metadata(now), scale=case.scale, softcap=None, sinks=None)
    case.problem = replace(case.problem, window=9)
    torch.testing.assert_close(output.cpu().double(), case.expected(), atol=2e-5, rtol=2e-5)
    assert backend.bytes_per_block == TritonBackend(case.spec(), torch.device(DEVICE)).bytes_per_block


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float16}, "torch.float16 is neither float32 nor bfloat16"),
        (
            {"cache_dtype": torch.float16},
            "the KV cache has dtype torch.float16, the kernels support torch.float32, torch.bfloat16",
        ),
        (
            {"layers": (LayerSpec(num_heads=1, num_kv_heads=1, k_dim=512, v_dim=64),)},
            "head size must be at most 256, got 512",
        ),
    ],
)
def test_the_kernels_say_what_they_cannot_do(change: dict[str, Any], reason: str) -> None:
    layer = LayerSpec(num_heads=2, num_kv_heads=1, k_dim=64, v_dim=64)
    spec = AttentionSpec(**{"layers": (layer,), "block_size": 16, "dtype": torch.float32, **change})
    unsupported = TritonBackend.unsupported_reason(spec, torch.device(DEVICE))
    assert unsupported is not None
    assert reason in unsupported


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_fp8_is_refused_on_gpus_for_which_triton_does_not_know_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    case = Case(Problem(((1, 1),)), torch.bfloat16, cache_dtype=FP8)
    reason = TritonBackend.unsupported_reason(case.spec(), torch.device("cuda"))
    expected = "keys and values in fp8 need compute capability 8.9, and this GPU has 8.0" if refused else None
    assert reason == expected


def test_the_kernels_compile_for_hopper_within_its_shared_memory() -> None:
    """Triton's compiler and ptxas need no GPU; they see errors that the interpreter does not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "engine.compile_for_hopper"]
    tests = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = {name: int(size) for name, size in (line.split() for line in done.stdout.splitlines())}
    kernels = ("decode_split", "decode", "prefill", "prefill_with_everything", "join_splits_kernel", "write_kv_kernel")
    assert {name + kept for name in kernels for kept in ("", "_fp8")} <= sizes.keys()
    assert {f"{name}_float32_kept_in_bfloat16" for name in ("decode_split", "write_kv_kernel")} <= sizes.keys()
    assert max(sizes.values()) <= 227 << 10
    # several decoding programs share a multiprocessor
    assert max(sizes["decode_split"], sizes["decode_split_fp8"]) <= 64 << 10
