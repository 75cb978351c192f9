"""Questions become prompts and labels, whatever the tokenizer and the chat template."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from headrace_engine.errors import InvalidRequestError
from headrace_engine.text.decision_plan import plan_of, text_of_question
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_parts import TokenizerParts

QUESTION = {"type": "predicate", "instructions": "old"}
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') == loop.index0 % 2 %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{{ m.content | trim }}\n{% endfor %}A:"
)


def tokenizer(vocabulary: str, template: str | None = ALTERNATES, normalizer: Any = None) -> ModelTokenizer:
    """Make a token of each of these characters, and one of all others."""
    backend = Tokenizer(WordLevel({"?": 0, **{each: 1 + at for at, each in enumerate(vocabulary)}}, unk_token="?"))
    backend.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]
    backend.normalizer = normalizer
    json = backend.to_str().encode()
    return ModelTokenizer(TokenizerParts(tokenizer_json=json, special_tokens={}, chat_template=template))


@pytest.mark.parametrize(
    ("vocabulary", "normalizer"),
    [
        ("", None),
        ("A", normalizers.Replace("B", "A")),
        ("AB", normalizers.Replace("B", "")),
        ("AB", normalizers.Replace("B", "AB")),
    ],
)
def test_a_model_that_does_not_tell_the_labels_apart_cannot_decide(vocabulary: str, normalizer: Any) -> None:
    with pytest.raises(InvalidRequestError, match="the model's tokenizer does not tell 2 labels apart"):
        plan_of("x", [QUESTION], tokenizer(vocabulary, normalizer=normalizer))
    assert plan_of("x", [QUESTION], tokenizer("AB")).labels == [[[1], [2]]]


@pytest.mark.parametrize(
    "given", ["x", [{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}]]
)
def test_a_question_continues_the_last_message_of_the_user(given: Any) -> None:
    plan = plan_of(given, [QUESTION], tokenizer("ABx"))
    assert plan == plan_of("x", [QUESTION], tokenizer("ABx"))


def test_a_question_follows_the_last_message_of_the_assistant() -> None:
    given = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    assert plan_of(given, [QUESTION], tokenizer("ABx")).shared.count(3) == 2 + 1  # one in the word text


@pytest.mark.parametrize("template", ["{{ messages[-1].content * 2 }}", "{{ messages[-1].content[:9] }}"])
def test_a_template_that_does_not_show_the_question_once_cannot_decide(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="does not show the last message once"):
        plan_of("x", [QUESTION], tokenizer("AB", template))


def test_a_field_of_null_is_absent() -> None:
    choices = [{"value": "mill", "label": None, "description": None}, {"value": True}]
    question = {"type": "choice", "instructions": "Where?", "choices": choices, "levels": None}
    assert text_of_question(question) == "Where?\nA: mill\nB: true"
