"""Properties of all parsers: pieces do not matter, no text is lost, and the work is linear in the text."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_gateway.parsers.registry import TOOL_PARSERS
from unit.gateway.parsers.parsing import events_of, folded

pytestmark = pytest.mark.rotated("gateway/headrace_gateway/parsers")

PAIRS = [
    *((tool, reasoning) for tool in sorted(TOOL_PARSERS - {"openai"}) for reasoning in (None, "think", "mistral")),
    (None, "think"),
    (None, None),
    ("openai", "openai"),
    ("openai", None),
    (None, "openai"),
]
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
    *("[CALL_ID]", "<function=f>", "<parameter=a>", "<parameter=n>", "</parameter>", "</function>", "\n</parameter>"),
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|tool_call|>", "functools[", "<function_call>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json", "```"),  # noqa: RUF001
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
    *("<|start|>", "assistant", "analysis", "final", "commentary", "to=functions.f", "<|constrain|>", "<|im_end|>"),
    *(
        '{"name": "f", "arguments": {"a": "b"}}',
        '{"name": "g"}',
        '{"name": "',
        '"arguments": ',
        '"parameters":',
        "f",
        "g",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ":",
        "(",
        ")",
        "=",
        "'",
        "<",
        "|",
        " ",
        "\n",
        "é🙂",
        "x",
        "None",
        "1.",
        " " * 70,
    ),
    *("f(a=1)", '[f(a="x", n=[1, 2]), g()]', "null", "-3e5", "</"),
]
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=5)), max_size=25).map("".join)


@pytest.mark.parametrize(("tool_parser", "reasoning_parser"), PAIRS)
@settings(max_examples=40, deadline=None)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 200), max_size=8),
    opened=st.sampled_from([None, "<think>\n", "[THINK]"]),
    parallel=st.booleans(),
)
def test_the_pieces_in_which_text_arrives_do_not_change_the_events(
    tool_parser: str | None,
    reasoning_parser: str | None,
    text: str,
    cuts: list[int],
    opened: str | None,
    parallel: bool,
) -> None:
    whole = events_of(tool_parser, [text], reasoning_parser, opened, parallel=parallel)
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(at)]
    assert events_of(tool_parser, pieces, reasoning_parser, opened, parallel=parallel) == whole
    assert events_of(tool_parser, list(text), reasoning_parser, opened, parallel=parallel) == whole
    assert folded(whole)


LONG = 1_000_000
KINDS = ("hermes", "llama3_json", "pythonic", "mistral", "openai")
ANY = {
    "text": "word " * (LONG // 5),
    "braces": "{" * LONG,
    "open tags": "<" * LONG,
    "space": " " * LONG,
}
OWN = {
    ("hermes", "arguments"): '<tool_call>{"name": "f", "arguments": {"a": "' + "x{<" * (LONG // 3),
    ("hermes", "depth"): '<tool_call>{"name": "f", "arguments": ' + '{"a":' * (LONG // 5),
    ("hermes", "arguments first"): '<tool_call>{"arguments": ' + "[" * LONG,
    ("hermes", "calls"): '<tool_call>{"name": "f"}</tool_call>' * (LONG // 40),
    ("hermes", "openers"): "<tool_call>" * (LONG // 11),
    ("qwen3_xml", "depth"): "<tool_call><function=f><parameter=n>" + "[" * LONG + "</parameter></function></tool_call>",
    ("pythonic", "depth"): "[f(a=" + "[" * (LONG // 2) + "]" * (LONG // 2) + ")]",
    ("pythonic", "escapes"): "[f(a='" + "\\n" * (LONG // 2) + "')]",
    ("mistral", "name"): "[TOOL_CALLS]" + "f" * LONG,
    ("deepseek_v3", "name"): "<｜tool▁call▁begin｜>" + "f" * LONG,  # noqa: RUF001
    ("glm45", "value"): "<tool_call>f<arg_key>n</arg_key><arg_value>" + "<" * LONG + "</arg_value></tool_call>",
    ("openai", "header"): "<|channel|>" * (LONG // 11),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("tool_parser", "text"),
    [
        *(pytest.param(tool, text, id=f"{tool}-{name}") for name, text in ANY.items() for tool in KINDS),
        *(pytest.param(tool, text, id=f"{tool}-{name}") for (tool, name), text in OWN.items()),
    ],
)
def test_work_is_linear_in_the_length_of_the_text(tool_parser: str, text: str) -> None:
    """A megabyte takes less than a second. If the work were quadratic, this test would not end."""
    whole = events_of(tool_parser, [text])
    size = 1000 if len(text) > LONG // 2 else 100
    assert events_of(tool_parser, [text[start : start + size] for start in range(0, len(text), size)]) == whole


@pytest.mark.timeout(120)
@pytest.mark.parametrize("text", ["<" * 100_000, "{" * 100_000, "a " * 50_000])
def test_work_is_linear_in_the_number_of_pieces(text: str) -> None:
    prefix = '<tool_call>{"name": "f", "arguments": {"a": "'
    for before in ("", prefix):
        assert events_of("hermes", list(before + text)) == events_of("hermes", [before + text])
