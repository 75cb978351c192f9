"""The last layer computes the rows whose logits are asked for, and nothing that is read changes by that."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.kernel_builds import PAIRS_ARE_FASTER, PAIRS_ARE_SLOWER, build
from engine.tiny_models import VOCAB_SIZE, TinyModel
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.batch import RequestBatch, StepInputs, TokenSpan
from headrace_engine.runner.contracts import NewRequest
from headrace_engine.runner.fused import decoder_stack
from headrace_engine.runner.fused.decoder_stack import DecoderStack
from headrace_engine.runner.linear import native_linear
from headrace_engine.runner.models.paged_model import PagedModel
from headrace_engine.runner.sampling.request_processors import ProcessorSet

pytestmark = pytest.mark.rotated("engine/headrace_engine/runner/models", "engine/headrace_engine/runner/attention")

BLOCK_SIZE = 16
LENGTHS = {"chunked": 91, "short": 45, "decode": 8, "verified": 64}
NUM_BLOCKS = sum(-(-length // BLOCK_SIZE) for length in LENGTHS.values())
# How many tokens of which sequence are computed together, and how many of the last ones give logits. Later steps
# read the keys and values of tokens whose logits nobody asked for.
STEPS = [
    {"chunked": (20, 0), "verified": (37, 0)},
    {"decode": (3, 1)},
    {"chunked": (33, 0), "decode": (1, 1), "short": (41, 1), "verified": (20, 1)},
    {"short": (1, 1), "chunked": (35, 0), "verified": (3, 3), "decode": (2, 2)},
    {"decode": (1, 1), "chunked": (1, 0), "verified": (4, 4)},  # rows that move onto each other's places
    {"decode": (1, 1), "short": (1, 1)},
    {"short": (2, 2), "chunked": (2, 1)},
]


class Laboratory:
    """A model whose layers are computed in one call, and steps put together by the test."""

    def __init__(self, folder: str, dtype: str) -> None:
        config = EngineArgs(model=folder, dtype=dtype, block_size=BLOCK_SIZE).create_engine_config()
        self.model = PagedModel(config.model, config.cache)
        self.stack: Any = self.model._model.get_decoder().layers[0]
        assert isinstance(self.stack, DecoderStack)
        self._processors = ProcessorSet(config)
        self._free = iter(range(1, 1 + 2 * NUM_BLOCKS))  # each run has memory that no other has written
        self.model.allocate(1 + 2 * NUM_BLOCKS)

    def steps(self) -> list[StepInputs]:
        batch = RequestBatch(len(LENGTHS), NUM_BLOCKS, BLOCK_SIZE, self._processors)
        generator = torch.Generator().manual_seed(1)
        for name, length in LENGTHS.items():
            batch._add(
                NewRequest(
                    request_id=name,
                    token_ids=torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist(),
                    num_prompt_tokens=length,
                    sampling_params=SamplingParams(),
                    seed=0,
                    suppressed_token_ids=[],
                    block_ids=[next(self._free) for _ in range(-(-length // BLOCK_SIZE))],
                    num_computed_tokens=0,
                )
            )
        packed, done = [], dict.fromkeys(LENGTHS, 0)
        for step in STEPS:
            spans = []
            for name, (count, num_logits) in step.items():
                request, start = batch.requests[name], done[name]
                spans.append(TokenSpan(request, start, request.token_ids[start : start + count], num_logits))
                done[name] += count
            packed.append(batch.pack(spans, [], {}))
        assert done == LENGTHS
        return packed

    @torch.inference_mode()
    def logits(self, *, all_rows: bool) -> list[torch.Tensor]:
        """[indices, vocabulary] a step, computed by a last layer of the wanted rows or of all."""
        steps = [replace(step, logits_start=None) if all_rows else step for step in self.steps()]
        return [self.model.forward(step) for step in steps]


@pytest.fixture
def laboratory(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], Laboratory]:
    monkeypatch.setattr(native_linear, "preferred", lambda _: True)
    return lambda name, dtype: Laboratory(tiny_model(name).folder, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_of_mixed_steps_have_the_bits_that_a_whole_last_layer_gives_them(
    laboratory: Callable[[str, str], Laboratory], name: str, dtype: str, threads: int
) -> None:
    lab = laboratory(name, dtype)
    torch.set_num_threads(threads)
    try:
        found, expected = lab.logits(all_rows=False), lab.logits(all_rows=True)
    finally:
        torch.set_num_threads(1)
    assert [len(logits) for logits in found] == [sum(wanted for _, wanted in step.values()) for step in STEPS]
    for step, logits, whole in zip(STEPS, found, expected, strict=True):
        assert torch.equal(logits, whole), step


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize("maker", [PAIRS_ARE_FASTER, PAIRS_ARE_SLOWER])
def test_whether_products_bring_in_keys_and_values_changes_no_bit(
    laboratory: Callable[[str, str], Laboratory], maker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do it for some makers' processors only."""
    expected = laboratory("llama", "float32").logits(all_rows=False)
    layers = decoder_stack.declared(build("decoder_layers.c", "fused", maker))
    monkeypatch.setattr(decoder_stack, "_library", lambda: layers)
    monkeypatch.setattr(decoder_stack, "_last_cache_bytes", lambda: 1 << 20)
    for found, here in zip(laboratory("llama", "float32").logits(all_rows=False), expected, strict=True):
        assert torch.equal(found, here)


def test_in_tiles_of_equal_shape_the_last_layer_is_computed_whole(
    laboratory: Callable[[str, str], Laboratory], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = laboratory("llama", "float32")
    monkeypatch.setattr(lab.model, "_in_tiles", True)
    for logits, whole in zip(lab.logits(all_rows=False), lab.logits(all_rows=True), strict=True):
        assert torch.equal(logits, whole)


@torch.inference_mode()
def test_rows_that_nobody_reads_end_before_the_last_layers_attention(
    laboratory: Callable[[str, str], Laboratory],
) -> None:
    lab = laboratory("llama", "float32")
    seen: list[torch.Tensor] = []
    lab.stack.register_forward_hook(lambda _, __, output: seen.append(output[0].clone()))
    step = lab.steps()[2]
    lab.model.forward(step)
    lab.model.forward(replace(step, logits_start=None))
    found, whole = seen
    computed = (found == whole).all(dim=-1).nonzero()[:, 0]
    assert computed.tolist() == step.logits_indices.tolist() == [33, 74, 94]


def test_a_step_of_decodes_moves_no_rows(laboratory: Callable[[str, str], Laboratory]) -> None:
    whole = [all(count == wanted for count, wanted in step.values()) for step in STEPS]
    assert [step.logits_start is None for step in laboratory("llama", "float32").steps()] == whole
    assert any(whole)
