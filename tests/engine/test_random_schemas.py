"""Random JSON schemas on the default model: every output is a document that the schema validates.

A few seeded ones here; `make schemas` (HEADRACE_SCHEMAS=200) tries many. The KV memory is too small for the batch, so
that requests are preempted in the middle of their documents, and each request has two choices.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from engine.json_schemas import Schema, schemas
from headrace_engine import LLM, SamplingParams, StructuredOutputsParams

NUM_SCHEMAS = int(os.environ.get("HEADRACE_SCHEMAS", "6"))
SEED = int(os.environ.get("HEADRACE_SCHEMAS_SEED", "20"))
BATCH = 16
MAX_TOKENS = 500
PROMPT = [{"role": "user", "content": "Some JSON, please."}]
pytestmark = [
    pytest.mark.timeout(300 + 15 * NUM_SCHEMAS),
    pytest.mark.rotated(
        "engine/headrace_engine/grammar",
        "engine/headrace_engine/core/grammars.py",
    ),
]


@pytest.fixture(scope="module")
def llm(default_model_in: Callable[[str], Path]) -> Iterator[LLM]:
    llm = LLM(
        str(default_model_in("bfloat16")), max_model_len=600, block_size=16, num_blocks=40, max_num_seqs=2 * BATCH
    )
    yield llm
    llm.close()


def random_schemas(count: int) -> list[Schema]:
    """The same ones for the same seed, and no two alike."""
    found: dict[str, Schema] = {}

    @seed(SEED)
    @settings(
        max_examples=4 * count + 10,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas())
    def collect(schema: Schema) -> None:
        found.setdefault(json.dumps(schema, sort_keys=True), schema)

    collect()
    # The generator begins with the simplest ones.
    return random.Random(SEED).sample(list(found.values()), count)


def test_every_output_is_a_document_that_its_schema_validates(llm: LLM) -> None:
    preemptions, lengths = 0, []
    chosen = random_schemas(NUM_SCHEMAS)
    for first in range(0, len(chosen), BATCH):
        batch = chosen[first : first + BATCH]
        for number, schema in enumerate(batch):
            params = SamplingParams(
                n=2,
                temperature=1.0,
                seed=first + number,
                max_tokens=MAX_TOKENS,
                # A number's digits and free whitespace have no end in JSON, and so small a model falls into them.
                frequency_penalty=0.4,
                structured_outputs=StructuredOutputsParams(json=schema, whitespace_pattern=" ?"),
            )
            llm.engine.add_chat_request(
                str(first + number), [{"role": "user", "content": "Some JSON, please."}], params
            )
        documents = {}
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                for choice in output.outputs:
                    documents[int(output.request_id), choice.index] = choice
            preemptions += llm.engine._core.core.scheduler.stats.preemptions  # type: ignore[attr-defined]
        for (number, _), choice in documents.items():
            assert choice.finish_reason == "stop", (chosen[number], choice.text)
            validator = jsonschema.Draft202012Validator(
                chosen[number], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            validator.validate(json.loads(choice.text))
            lengths.append(len(choice.token_ids))
    assert len(lengths) == 2 * NUM_SCHEMAS
    print(f"{NUM_SCHEMAS} schemas, {len(lengths)} documents, {sum(lengths)} tokens, {preemptions} preemptions")  # noqa: T201
    if NUM_SCHEMAS > BATCH:
        assert preemptions > 0
