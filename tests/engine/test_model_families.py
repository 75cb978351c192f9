"""Every model family that is served generates transformers' own tokens; every other one is refused with its reason.

Each family runs one scenario that forces everything at once: chunks, preemptions, cache hits. `docs/models.md` lists
what these tests prove; `HEADRACE_WRITE_DOCS=1` writes it again.
"""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from engine.greedy_runs import greedy_tokens
from engine.model_families import FAMILIES, REFUSED, VOCAB_SIZE
from engine.model_table import render
from engine.tiny_models import TinyModel, save_model
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.errors import ModelLoadError
from headrace_engine.options.engine_args import EngineArgs

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
MAX_MODEL_LEN = 96
rotated = pytest.mark.rotated(
    "engine/headrace_engine/runner/models", "engine/headrace_engine/runner/recurrent", "tests/engine/model_families.py"
)


@cache
def workload() -> list[tuple[list[int], int]]:
    """9 prompts, two pairs of which share 48 tokens, with their max_tokens."""
    draw = random.Random(21)  # not pytest's seed: families are compared on the same prompts
    prefix = [draw.randrange(3, VOCAB_SIZE) for _ in range(48)]
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 16, 33, 40, 70)]
    prompts += [[*prefix, *(draw.randrange(3, VOCAB_SIZE) for _ in range(length))] for length in (0, 1, 7, 30)]
    return [(prompt, draw.choice([6, 10, 14])) for prompt in prompts]


def core_for(folder: Path, **options: Any) -> EngineCore:
    args = {"dtype": "float32", "block_size": 16, "max_model_len": MAX_MODEL_LEN, **options}
    config = EngineArgs(model=str(folder), **args).create_engine_config()
    return EngineCore(config, create_runner(config))


@rotated
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_preemptions_and_cache_hits_leave_every_token_as_transformers_has_it(name: str, tmp_path: Path) -> None:
    model = TinyModel(name, str(tmp_path), save_model(name, tmp_path))
    core = core_for(tmp_path, attention_backend="native", num_blocks=11, max_num_batched_tokens=19, max_num_seqs=6)
    tokens = greedy_tokens(core, workload(), least_hits=48)
    expected = [model.generate(prompt, max_tokens) for prompt, max_tokens in workload()]
    assert tokens == expected
    assert len({tuple(output) for output in expected}) > len(expected) / 2, "a model that says one thing proves nothing"


@rotated
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_right_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    refused = REFUSED[name]
    if "cannot be served" in refused.reason:  # seen by running it, so it takes weights
        save_model(refused, tmp_path)
    else:
        CONFIG_MAPPING[refused.model_type](**refused.options).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        core_for(tmp_path, num_blocks=20)
    assert str(caught.value) == refused.reason.format(model=tmp_path)


def test_the_document_lists_what_these_tests_prove() -> None:
    text = render()
    if os.environ.get("HEADRACE_WRITE_DOCS"):
        DOCUMENT.write_text(text)
    assert DOCUMENT.read_text() == text, "run this test with HEADRACE_WRITE_DOCS=1"
