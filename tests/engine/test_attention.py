"""Both attention backends against attention written out in float64, on random shapes.

Caches are poisoned with NaN first: a kernel that lets one unwritten key or value through gives NaN.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.attention_cases import Case, Problem
from engine.kernel_builds import MAY_MULTIPLY_PAIRS, OTHER_PROCESSORS, build
from headrace_engine.runner.attention import native
from headrace_engine.runner.attention.backend import AttentionMetadata, AttentionSpec, LayerSpec
from headrace_engine.runner.attention.native import NativeBackend
from headrace_engine.runner.attention.reference import ReferenceBackend

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/attention",
    "engine/headrace_engine/runner/native",
    "tests/engine/attention_cases.py",
    "tests/engine/kernel_builds.py",
)

problems = st.builds(
    Problem,
    sequences=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 60)), min_size=1, max_size=5).map(tuple),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    k_dim=st.sampled_from([8, 20, 21, 32, 64, 80, 192, 256]),
    v_dim=st.sampled_from([4, 15, 16, 24, 64, 72, 128, 256]),
    block_size=st.sampled_from([16, 32]),
    window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.sampled_from([1.0, 20.0, 50.0]),
    sinks=st.booleans(),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    seed=st.integers(0, 1000),
)


both_backends = pytest.mark.parametrize("backend_type", [ReferenceBackend, NativeBackend], ids=["torch", "native"])


# Rows of one unit for which a whole chunk is masked before the first that they see.
LATE_WINDOW = Problem(((0, 150),), kv_heads=6, group=3, k_dim=64, v_dim=40, block_size=32, window=16)
WIDE = Problem(((0, 60), (37, 60), (90, 1)), kv_heads=2, group=8, k_dim=256, v_dim=256, block_size=32)


@both_backends
@example(Problem(((0, 1),)))
@example(Problem(((16, 1), (15, 1), (17, 1)), window=1))
@example(Problem(((64, 33),), window=16, group=3))
@example(WIDE)
@given(problems)
@settings(max_examples=50, deadline=None)
def test_float32_attention_is_exact_to_rounding(backend_type: Any, problem: Problem) -> None:
    case = Case(problem, torch.float32)
    torch.testing.assert_close(case.compute(backend_type(case.spec())).double(), case.expected(), atol=2e-5, rtol=2e-5)


@both_backends
@example(WIDE)
@example(LATE_WINDOW)
@example(replace(LATE_WINDOW, softcap=20.0, block_size=16))
@example(Problem(((5, 9),), group=48, k_dim=64, block_size=32))
@example(Problem(((5, 9),), group=50, k_dim=64, block_size=32))
@example(Problem(((5, 9),), k_dim=576, v_dim=512, block_size=32))
@given(problems)
@settings(max_examples=30, deadline=None)
def test_bfloat16_attention_is_right_to_the_outputs_rounding(backend_type: Any, problem: Problem) -> None:
    case = Case(problem, torch.bfloat16)
    # What is multiplied in pairs of bfloat16 is rounded to it, the softmax's weights among it.
    in_pairs = backend_type is NativeBackend and native.library().headrace_attention_has_pairs()
    output = case.compute(backend_type(case.spec()))
    torch.testing.assert_close(output.double(), case.expected(), atol=8e-3 if in_pairs else 2e-3, rtol=2**-7)


@both_backends
@example(WIDE)
@example(Problem(((16, 1), (15, 1), (17, 1)), window=1))
@given(problems)
@settings(max_examples=30, deadline=None)
def test_float32_over_a_bfloat16_cache_is_as_exact_as_what_the_cache_keeps(backend_type: Any, problem: Problem) -> None:
    case = Case(problem, torch.float32, cache_dtype=torch.bfloat16)
    torch.testing.assert_close(case.compute(backend_type(case.spec())).double(), case.expected(), atol=2e-5, rtol=2e-5)


@both_backends
def test_a_bfloat16_cache_rounds_keys_and_values_to_the_nearest(backend_type: Any) -> None:
    case = Case(WIDE, torch.float32, cache_dtype=torch.bfloat16)
    exact = Case(WIDE, torch.float32)  # the same draws, not yet rounded
    case.key, case.value = exact.key, exact.value
    case.value[0][0, 0, 0] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # a NaN, cut off: infinity
    output = case.compute(backend_type(case.spec()))
    case.key, case.value = ([t.bfloat16().float() for t in tensors] for tensors in (case.key, case.value))
    torch.testing.assert_close(output.double(), case.expected(), atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize("without", OTHER_PROCESSORS)
def test_builds_for_other_processors_compute_the_same(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = native.declared(build("paged_attention.c", "attention", without))
    monkeypatch.setattr(native, "library", lambda: other)
    assert without in MAY_MULTIPLY_PAIRS or not other.headrace_attention_has_pairs()
    odd = Problem(((0, 33), (20, 1)), group=3, k_dim=21, v_dim=40, window=9, softcap=20.0, sinks=True)
    for problem in (WIDE, odd, LATE_WINDOW):
        case = Case(problem, torch.float32)
        torch.testing.assert_close(
            case.compute(NativeBackend(case.spec())).double(), case.expected(), atol=2e-5, rtol=2e-5
        )
        case = Case(problem, torch.bfloat16)
        torch.testing.assert_close(
            case.compute(NativeBackend(case.spec())).double(), case.expected(), atol=8e-3, rtol=2**-7
        )
        case = Case(problem, torch.float32, cache_dtype=torch.bfloat16)
        torch.testing.assert_close(
            case.compute(NativeBackend(case.spec())).double(), case.expected(), atol=2e-5, rtol=2e-5
        )


TYPES = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]
"""Of queries and of the cache."""


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    case = Case(WIDE, dtype, cache_dtype=cache_dtype)
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(case.compute(NativeBackend(case.spec())))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES)
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (90, True), (16, False)])
@pytest.mark.parametrize("heads", [1, 6])
def test_how_a_prompt_is_cut_into_steps_changes_no_bit(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, window: int | None, sinks: bool, heads: int
) -> None:
    # Of six heads the dimensions are such as matrix tiles take, and there is work enough for the largest units.
    k_dim, block_size = (20, 16) if heads == 1 else (64, 32)
    whole = Problem(((0, 150),), heads, 3, k_dim, 40, block_size, window=window, sinks=sinks)
    case = Case(whole, dtype, cache_dtype=cache_dtype)
    output = case.compute(NativeBackend(case.spec()))
    for past in (1, 63, 64, 77, 149):
        case = Case(replace(whole, sequences=((past, 150 - past),)), dtype, cache_dtype=cache_dtype)
        assert torch.equal(case.compute(NativeBackend(case.spec())), output[past:])


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES)
def test_what_else_a_step_computes_changes_no_bit(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    # Decoding and prompts in turn: one thread goes from units of few rows to units of many, and back.
    step = Problem(((40, 1), (0, 60), (20, 4), (70, 1)), kv_heads=2, group=3, k_dim=64, v_dim=64, block_size=32)
    together, before = Case(step, dtype, cache_dtype=cache_dtype), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        outputs = together.compute(NativeBackend(together.spec())).split([new for _, new in step.sequences])
        for number, output in enumerate(outputs):
            alone = Case(replace(step, sequences=(step.sequences[number],)), dtype, cache_dtype=cache_dtype)
            alone.query, alone.key, alone.value = (
                [drawn[number]] for drawn in (together.query, together.key, together.value)
            )
            assert torch.equal(alone.compute(NativeBackend(alone.spec())), output)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("spread", "seed"), [(2.0, 0), (6.0, 2)])
def test_where_a_window_begins_changes_no_bit_of_a_softmax_in_bfloat16(spread: float, seed: int) -> None:
    whole = Problem(((0, 500),), 6, 3, k_dim=64, v_dim=64, block_size=32, window=200, spread=spread, seed=seed)
    case = Case(whole, torch.bfloat16)
    output = case.compute(NativeBackend(case.spec()))
    for past in (1, 63, 64, 77, 149, 300, 401):
        case = Case(replace(whole, sequences=((past, 500 - past),)), torch.bfloat16)
        assert torch.equal(case.compute(NativeBackend(case.spec())), output[past:]), past


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
def test_how_a_prompt_is_cut_into_steps_changes_no_bit_without_avx512(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = native.declared(build("paged_attention.c", "attention", "-mno-avx512f"))
    monkeypatch.setattr(native, "library", lambda: other)
    for group, window in ((1, None), (2, None), (4, None), (5, None), (7, None), (2, 12)):
        whole = Problem(((0, 40),), group=group, k_dim=64, v_dim=64, window=window)
        output = (case := Case(whole, torch.float32)).compute(NativeBackend(case.spec()))
        for past in range(1, 40):
            case = Case(replace(whole, sequences=((past, 40 - past),)), torch.float32)
            assert torch.equal(case.compute(NativeBackend(case.spec())), output[past:]), (group, past)


@both_backends
def test_scores_far_beyond_the_range_of_exp_are_still_a_softmax(backend_type: Any) -> None:
    case = Case(Problem(((40, 9),), spread=300.0, group=2), torch.float32)
    output = case.compute(backend_type(case.spec()))
    # One key outweighs all others: the output is its value.
    best = (case.query[0][-1, 0] @ case.key[0][:, 0].T).argmax()
    torch.testing.assert_close(output[-1, 0], case.value[0][best, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES)
@pytest.mark.parametrize("growth", [0.01, 0.03, 0.2, -0.03])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_softmax_whose_scores_rise_from_key_to_key_is_as_exact(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, growth: float, sinks: bool
) -> None:
    case = Case(Problem(((590, 10),), group=3, k_dim=8, sinks=sinks), dtype, cache_dtype=cache_dtype)
    case.key[0][..., 0] = (growth * torch.arange(600))[:, None].to(cache_dtype or dtype).to(dtype)
    case.query[0][..., 0] = 1 / case.scale
    output = case.compute(NativeBackend(case.spec()))
    tolerance = 2e-5 if dtype is torch.float32 else 8e-3
    torch.testing.assert_close(output.double(), case.expected(), atol=tolerance, rtol=tolerance)


@both_backends
def test_a_sink_of_minus_infinity_is_none(backend_type: Any) -> None:
    case = Case(Problem(((0, 150),), window=16), torch.float32)
    without = case.compute(backend_type(case.spec()))
    case.sinks = torch.full((case.heads,), -torch.inf)
    torch.testing.assert_close(case.compute(backend_type(case.spec())), without)


@both_backends
def test_sequences_do_not_see_each_other(backend_type: Any) -> None:
    pair = Case(Problem(((20, 5), (33, 7)), kv_heads=2, group=2), torch.float32)
    both = pair.compute(backend_type(pair.spec()))
    pair.key[1], pair.value[1] = pair.key[1] * 100, pair.value[1] * 100
    assert torch.equal(pair.compute(backend_type(pair.spec()))[:5], both[:5])


@both_backends
def test_a_layer_without_keys_of_its_own_reads_the_ones_of_its_source(backend_type: Any) -> None:
    case = Case(Problem(((20, 5), (33, 7)), kv_heads=2, group=2, k_dim=24, v_dim=40), torch.float32)
    (own,) = case.spec().layers
    spec = AttentionSpec(layers=(own, replace(own, kv_source=0, window=9)), block_size=16, dtype=torch.float32)
    backend = backend_type(spec)
    case.compute(backend)
    now = [(past, past + new) for past, new in case.problem.sequences]
    output = backend.forward(
        1,
        case.packed(case.query, now),
        torch.full((12, 2, 24), float("nan")),
        torch.full((12, 2, 40), float("nan")),
        case.metadata(now),
        scale=case.scale,
        softcap=None,
        sinks=None,
    )
    case.problem = replace(case.problem, window=9)
    torch.testing.assert_close(output.double(), case.expected(), atol=2e-5, rtol=2e-5)
    assert backend.bytes_per_block == backend_type(case.spec()).bytes_per_block


@pytest.mark.parametrize("threads", [1, 2])
def test_a_block_that_is_filled_in_the_same_step_is_read_whole_by_whoever_shares_it(threads: int) -> None:
    size, heads, dim = 16, 1, 32
    layer = LayerSpec(num_heads=heads, num_kv_heads=heads, k_dim=dim, v_dim=dim)
    backend = NativeBackend(AttentionSpec(layers=(layer,), block_size=size, dtype=torch.float32))
    backend.allocate(3)
    query, key, value = torch.randn(3, size + 1, heads, dim, generator=torch.Generator().manual_seed(3))
    table = torch.tensor([[1, 2], [1, 0]], dtype=torch.int32)

    def compute(positions: list[int], starts: list[int], lengths: list[int], rows: list[int]) -> torch.Tensor:
        metadata = AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            table_rows=torch.tensor(rows, dtype=torch.int32),
            block_table=table,
            slot_mapping=torch.tensor([size + position for position in positions]),  # block 2 lies behind block 1
            max_query_len=max(end - start for start, end in pairwise(starts)),
        )
        parts = (tensor[positions].contiguous() for tensor in (query, key, value))
        return backend.forward(0, *parts, metadata, scale=1.0, softcap=None, sinks=None)

    torch.set_num_threads(threads)
    try:
        compute(list(range(size - 1)), [0, size - 1], [size - 1], [1])
        found = compute([size, size - 1], [0, 1, 2], [size + 1, size], [0, 1])[0]  # the sharer comes first
    finally:
        torch.set_num_threads(1)
    weights = (query[size, 0] @ key[:, 0].T).softmax(dim=-1)
    torch.testing.assert_close(found[0], weights @ value[:, 0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": 24}, "block size 24 is not a multiple of 16"),
        ({"dtype": torch.float16}, "torch.float16 is neither float32 nor bfloat16"),
    ],
)
def test_the_native_kernel_says_what_it_cannot_do(change: dict[str, Any], reason: str) -> None:
    layer = LayerSpec(num_heads=2, num_kv_heads=1, k_dim=64, v_dim=64)
    spec = AttentionSpec(**{"layers": (layer,), "block_size": 16, "dtype": torch.float32, **change})
    unsupported = NativeBackend.unsupported_reason(spec)
    assert unsupported is not None
    assert reason in unsupported


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES)
def test_a_block_costs_what_its_tensors_hold(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    problem = Problem(((0, 1),), kv_heads=3, group=2, k_dim=40, v_dim=24, block_size=32)
    case = Case(problem, dtype, cache_dtype=cache_dtype)
    for kind in (NativeBackend, ReferenceBackend):
        backend = kind(case.spec())
        backend.allocate(7)
        held = sum(t.numel() * t.itemsize for t in (*backend._k_cache, *backend._v_cache))
        assert held == 7 * backend.bytes_per_block
