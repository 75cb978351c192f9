"""Every step finds its shape among those that were compiled, and none is compiled that no step can ask for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.errors import ConfigError, RecompilationError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.runner.static.shapes import Shape, ShapeGrid


def grid(max_model_len: int = 1000, **options: Any) -> ShapeGrid:
    config = EngineArgs(model="m", device="static-cpu", **options).create_engine_config()
    return ShapeGrid(config, max_model_len)


buckets = st.one_of(st.none(), st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True).map(sorted))


@st.composite
def grids(draw: st.DrawFn) -> tuple[ShapeGrid, int, int]:
    max_model_len = draw(st.integers(2, 300))
    contexts = draw(buckets)
    decode = draw(buckets)
    prefill = draw(buckets)
    found = grid(
        max_model_len,
        block_size=draw(st.sampled_from([1, 3, 16, 32])),
        max_num_seqs=decode[-1] if decode else draw(st.integers(1, 300)),
        max_num_batched_tokens=max(prefill[-1] if prefill else 0, draw(st.integers(1, 400))),
        prefill_buckets=prefill,
        decode_buckets=decode,
        context_buckets=[*(c for c in contexts if c < max_model_len), max_model_len] if contexts else None,
    )
    return found, max_model_len, found._block_size


@given(made=grids(), data=st.data())
def test_every_step_that_the_scheduler_may_plan_has_a_shape(
    made: tuple[ShapeGrid, int, int], data: st.DataObject
) -> None:
    found, max_model_len, block_size = made
    shapes = found.shapes()
    assert len(set(shapes)) == len(shapes)
    if data.draw(st.booleans()):
        rows, tokens = data.draw(st.integers(1, found.decode[-1])), 1
    else:
        rows, tokens = 1, data.draw(st.integers(1, min(found.prefill[-1], max_model_len)))
    context = data.draw(st.integers(tokens, max_model_len))
    shape = found.choose(rows, tokens, context)
    assert shape in shapes
    assert shape.rows >= rows
    assert shape.tokens >= tokens
    assert shape.blocks * block_size >= context


def test_defaults_double_the_rows_and_read_multiples_of_128_positions() -> None:
    found = grid(3000, max_num_seqs=12, max_num_batched_tokens=1024)
    assert found.prefill == [128, 512, 1024]
    assert found.decode == [1, 2, 4, 8, 12]
    assert [blocks * 32 for blocks in found.blocks] == [512, 2048, 3072]
    # a chunk of more than 512 tokens never fits into the smallest context
    assert Shape(1, 1024, 16) not in found.shapes()
    assert len(found.shapes()) == 3 + 3 + 2 + 5 * 3


def test_buckets_that_do_not_fit_are_all_named() -> None:
    with pytest.raises(ConfigError) as error:
        grid(
            100,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            prefill_buckets=[32, 65],
            decode_buckets=[8],
            context_buckets=[64],
        )
    assert str(error.value) == (
        "prefill buckets must be at most max_num_batched_tokens, 64, got 65; "
        "decode buckets must be at most max_num_seqs, 4, got 8; "
        "the largest context bucket must be at least 100, got 64"
    )


def test_a_step_for_which_nothing_was_compiled_is_an_error() -> None:
    found = grid(100, max_num_seqs=4, max_num_batched_tokens=64, context_buckets=[128])
    for rows, tokens, context in ((5, 1, 10), (1, 65, 65), (1, 1, 129)):
        with pytest.raises(RecompilationError, match="the largest bucket that is compiled holds"):
            found.choose(rows, tokens, context)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"device": "neuron", "decode_buckets": [4, 2]},
            "decode_buckets must be a list of integers of at least 1 in rising order, got [4, 2]",
        ),
        (
            {"device": "neuron", "decode_buckets": []},
            "decode_buckets must be a list of integers of at least 1 in rising order, got []",
        ),
        ({"device": "cpu", "prefill_buckets": [4]}, "prefill_buckets is set, but only the devices neuron, xla"),
        ({"device": "static-cpu", "compile_cache_dir": "/x"}, "static-cpu compiles nothing that could be kept"),
        ({"device": "neuron", "compile_cache_dir": "s3://x"}, "compile_cache_dir must be a folder, got 's3://x'"),
        (
            {"device": "neuron", "tensor_parallel_size": 0},
            "tensor_parallel_size must be an integer of at least 1, got 0",
        ),
        ({"device": "xla", "attention_backend": "native"}, "attention_backend is 'native', but device xla has its own"),
        ({"device": "neuron", "batch_invariant": True}, "batch_invariant is set, which device neuron cannot do"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, neuron, xla, static-cpu, got 'tpu'"),
    ],
)
def test_wrong_options_are_refused_where_they_are_given(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineArgs(model="m", **options).create_engine_config()
    assert sentence in str(error.value)
