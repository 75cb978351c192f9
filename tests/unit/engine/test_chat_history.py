"""Histories of tool calls in templates of every shape: each call and each result is in the prompt."""

from typing import Any

import pytest

from headrace_engine.errors import InvalidRequestError
from headrace_engine.text.chat import ChatOptions, read_messages
from headrace_engine.text.chat_history import HistoryForm
from headrace_engine.text.chat_template import history_form, rendered

PAINT: dict[str, Any] = {"name": "paint", "arguments": '{"colour": "red"}'}
WASH: dict[str, Any] = {"name": "wash", "arguments": '{"hands": 2}'}
ID = "call_0a1b2c3d4e5f6a7b8c9d0e1f"

HEAD = "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
TAIL = "{% else %}{{ m.content }}{% endif %}{% endfor %}"
CALLS = "{% for c in m.tool_calls %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
TEXT_CALLS = "{% for c in m.tool_calls %}{{ '[' + c.function.name + c.function.arguments + ']' }}{% endfor %}"
MAPS = HEAD + "{{ m.content }}" + CALLS + TAIL
TEXTS = HEAD + "{{ m.content }}" + TEXT_CALLS + TAIL  # as DeepSeek V3 and functionary 3.2
ONE_CALL = (  # as Llama 3.1
    HEAD
    + "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}{{ m.content }}"
    + CALLS
    + TAIL
)
# as DeepSeek R1's distilled models: a content hides the calls
NULL_CONTENT = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and m.content is none %}" + TEXT_CALLS + "{% endif %}"
    "{% if m.content is not none %}{{ m.content }}{% endif %}{% endfor %}"
)
# as Mistral
NINE = (
    "{% macro check(id) %}{% if id is undefined or id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
    "{{ id }}{% endmacro %}"
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}[{{ c.function.name }}{{ c.function.arguments | tojson }} {{ check(c.id) }}]"
    "{% endfor %}{% elif m.role == 'tool' %}<{{ check(m.tool_call_id) }}>{{ m.content }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ALTERNATING = (  # as Gemma
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
PARTS = (  # as vision models
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
)
NOTHING = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"


def prompt(template: str, *messages: dict[str, Any]) -> str:
    return rendered(template, read_messages(list(messages)), ChatOptions(), {})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calling(*functions: dict[str, Any], content: str | None = None, ids: tuple[str, ...] = (ID, "b")) -> dict[str, Any]:
    calls = [{"id": name, "type": "function", "function": each} for name, each in zip(ids, functions, strict=False)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(text: str, call: str = ID) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(MAPS, '<user>hi<assistant>[paint{"colour": "red"}]<tool>done', id="maps"),
        pytest.param(TEXTS, '<user>hi<assistant>[paint{"colour": "red"}]<tool>done', id="texts"),
        pytest.param(NULL_CONTENT, '<user>hi<assistant>[paint{"colour": "red"}]<tool>done', id="null content"),
        pytest.param(ONE_CALL, '<user>hi<assistant>[paint{"colour": "red"}]<tool>done', id="one call"),
        pytest.param(
            PLAIN,
            '<user>hi<assistant><tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call><tool>done',
            id="no calls",
        ),
        pytest.param(
            ALTERNATING,
            '<user>hi<assistant><tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
            "<user><tool_response>\ndone\n</tool_response>",
            id="no calls, no results",
        ),
        pytest.param(
            PARTS,
            '<user>hi<assistant><tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
            "<user><tool_response>\ndone\n</tool_response>",
            id="parts",
        ),
    ],
)
def test_a_call_and_its_result_are_shown_in_the_form_that_the_template_takes(template: str, expected: str) -> None:
    assert prompt(template, user("hi"), calling(PAINT), result("done")) == expected


@pytest.mark.parametrize("template", [MAPS, TEXTS, NULL_CONTENT, ONE_CALL, NINE, PLAIN, ALTERNATING, PARTS])
def test_no_call_and_no_result_vanishes(template: str) -> None:
    text = prompt(
        template,
        user("hi"),
        calling(PAINT, WASH, content="I will."),
        result("painted"),
        result("washed", "b"),
        user("more"),
    )
    places = [text.find(each) for each in ("paint", '"colour": "red"', "painted")]
    assert -1 not in places
    assert places == sorted(places)
    places = [text.find(each) for each in ("wash", '"hands": 2', "washed", "more")]
    assert -1 not in places
    assert places == sorted(places)


def test_text_beside_calls_precedes_them_where_a_template_hides_one_of_them() -> None:
    text = prompt(NULL_CONTENT, user("hi"), calling(PAINT, content="I will."), result("done"))
    assert text == '<user>hi<assistant>I will.<assistant>[paint{"colour": "red"}]<tool>done'


def test_calls_of_one_message_come_one_by_one_where_a_template_takes_one() -> None:
    text = prompt(ONE_CALL, user("hi"), calling(PAINT, WASH), result("washed", "b"), result("painted"))
    assert text == ('<user>hi<assistant>[paint{"colour": "red"}]<tool>painted<assistant>[wash{"hands": 2}]<tool>washed')


def test_ids_that_a_template_refuses_become_short_ones_that_stay_pairs() -> None:
    chat = [user("hi"), calling(PAINT, WASH, ids=(ID, "abcDEF123")), result("washed", "abcDEF123"), result("painted")]
    text = prompt(NINE, *chat)
    first = text.split('"red"} ')[1][:9]
    assert f"<{first}>painted" in text
    assert first.isalnum()
    assert '[wash{"hands": 2} abcDEF123]<abcDEF123>washed' in text  # an id that fits stays
    assert prompt(NINE, *chat, user("more")).startswith(text)  # a cached prefix stays valid
    other = prompt(NINE, user("hi"), calling(PAINT, ids=("other",)), result("x", "other"))
    assert first not in other


def test_calls_without_ids_get_some_in_order() -> None:
    calls = [{"type": "function", "function": each} for each in (PAINT, WASH)]
    chat = [user("hi"), {"role": "assistant", "tool_calls": calls}]
    text = prompt(NINE, *chat, *({"role": "tool", "content": each} for each in ("painted", "washed")))
    first, second = text.split('"red"} ')[1][:9], text.split('"hands": 2} ')[1][:9]
    assert first != second
    assert text.endswith(f"<{first}>painted<{second}>washed")


def test_a_template_that_shows_no_call_in_any_form_refuses_the_conversation() -> None:
    with pytest.raises(InvalidRequestError, match="it shows tool calls in no form: send them as text"):
        prompt(NOTHING, user("hi"), calling(PAINT), result("done"))
    assert prompt(NOTHING, user("hi")) == ""


def test_the_form_of_most_templates_changes_nothing() -> None:
    assert history_form(MAPS, (), has_tools=False) == HistoryForm()
