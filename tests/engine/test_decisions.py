"""`LLM.decide` on a tiny Llama."""

from __future__ import annotations

import math
from collections.abc import Iterator
from string import ascii_uppercase
from typing import Any

import pytest

from engine.tiny_models import TinyModel
from headrace_engine import LLM, SamplingParams
from headrace_engine.api.decide import checked_plan
from headrace_engine.errors import ContextLengthError, InvalidRequestError
from headrace_engine.text.decision_plan import plan_of

PREDICATE = {"type": "predicate", "instructions": "The mill is on the river.", "name": "mill"}
CHOICE = {"type": "choice", "instructions": "Where is it?", "choices": [{"value": True}, {"value": "true"}]}
SCORE = {"type": "score", "instructions": "How old?", "levels": [{"label": name} for name in ("new", "old", "ruin")]}
MANY = {
    "type": "choice",
    "instructions": "Which?",
    "choices": [{"value": each} for each in "abcdefghijklmnopqrstuvwxyz1"],
}
SHORT = "the mill"
INPUT = "the river turns the mill " * 8


@pytest.fixture(scope="module")
def llm(llama: TinyModel) -> Iterator[LLM]:
    made = LLM(llama.folder, dtype="float32", num_blocks=400, block_size=16)
    yield made
    made.close()


def chance(llm: LLM, question: Any, label: str) -> float:
    """Return the probability of a label from the log-probabilities of a prompt that ends with it."""
    plan = plan_of(SHORT, [question], llm.llm_engine.tokenizer)
    start = plan.shared + plan.tails[0]
    tokens = llm.llm_engine.tokenizer.encode_plain(label)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": start + tokens}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    entries = output.prompt_logprobs[len(start) :]
    return sum(entry[token].logprob for entry, token in zip(entries, tokens, strict=True) if entry is not None)


@pytest.mark.parametrize(
    ("question", "labels"),
    [(PREDICATE, [*"AB"]), (SCORE, [*"ABC"]), (MANY, [*(f"A{letter}" for letter in ascii_uppercase), "BA"])],
)
def test_probabilities_are_those_of_the_labels_after_the_question(llm: LLM, question: Any, labels: list[str]) -> None:
    (answer,) = llm.decide(SHORT, [question])["answers"]
    found = [each["probability"] for each in answer.get("probabilities", ())]
    found = found or [answer["probability"], 1 - answer["probability"]]
    chances = [math.exp(chance(llm, question, label)) for label in labels]
    assert found == pytest.approx([each / sum(chances) for each in chances], rel=1e-4)
    assert sum(found) == pytest.approx(1)


def test_answers_have_the_forms_of_their_questions_in_order(llm: LLM) -> None:
    predicate, choice, score = llm.decide(INPUT, [PREDICATE, CHOICE, SCORE])["answers"]
    assert predicate.keys() == {"type", "name", "probability"}
    assert predicate["name"] == "mill"
    best = max(choice["probabilities"], key=lambda each: each["probability"])
    assert (choice["choice"], choice["confidence"]) == (best["value"], best["probability"])
    assert [type(each["value"]) for each in choice["probabilities"]] == [bool, str]
    levels = score["probabilities"]
    assert [each["value"] for each in levels] == [0, 1, 2]
    assert score["score"] == pytest.approx(sum(each["value"] * each["probability"] for each in levels))
    assert score["name"] is None


def test_the_input_is_computed_once(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.decide(INPUT, [PREDICATE] * 10)["usage"]
    size = len(llm.llm_engine.tokenize(INPUT))
    assert before["cached_tokens"] == 0
    assert size < before["input_tokens"]
    assert size - 16 < llm.decide(INPUT, [PREDICATE])["usage"]["cached_tokens"]


def test_messages_are_an_input(llm: LLM) -> None:
    of_text = llm.decide(INPUT, [SCORE])["answers"]
    assert llm.decide([{"role": "user", "content": INPUT}], [SCORE])["answers"] == of_text
    assert llm.decide([{"role": "assistant", "content": INPUT}], [SCORE])["answers"] != of_text


def test_wrong_questions_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="questions must hold 1 to 400 questions, got 0"):
        llm.decide(INPUT, [])
    with pytest.raises(ContextLengthError):
        llm.decide(INPUT * 200, [PREDICATE])


def test_a_label_of_several_tokens_counts_in_the_length_of_a_prompt(llm: LLM) -> None:
    limit = llm.llm_engine.model_info.max_model_len
    size = len(plan_of("", [MANY], llm.llm_engine.tokenizer).longest)
    word = " mill"
    assert llm.decide(word * (limit - 1 - size), [MANY])
    with pytest.raises(ContextLengthError, match=f"the prompt has {limit} tokens"):
        checked_plan(llm.llm_engine.input_processor, word * (limit - size), [MANY])
