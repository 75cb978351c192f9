"""The formats of calls as their models write them, and malformed output."""

# ruff: noqa: E501, RUF001 - the texts are as models write them
import json

import pytest

from headrace_gateway.errors import UnknownParserError
from headrace_gateway.parsers.registry import TOOL_PARSERS, make_parser
from headrace_gateway.requests.call import Function
from unit.gateway.parsers.parsing import Parsed, parse

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
XML = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"

GOOD = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    ("llama3_json", '{"name": "f", "parameters": {"a": "}"}}', "", [("f", '{"a": "}"}')]),
    ("llama3_json", '\n{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3_json", '{"name": "f"}; {"name": "g"}<|eot_id|>', "", [("f", "{}"), ("g", "{}")]),
    ("llama3_json", 'Hi. <|python_tag|>{"name": "g"}<|eom_id|>', "Hi.", [("g", "{}")]),
    ("llama3_json", '<|python_tag|>print("x")', 'print("x")', []),
    ("llama3_json", '{"city": "Paris"}', '{"city": "Paris"}', []),
    ("llama3_json", '{"parameters": {"a": 1}} x', '{"parameters": {"a": 1}} x', []),
    ("llama3_json", 'See {"name": "f"}', 'See {"name": "f"}', []),
    ("pythonic", "[f(a='it\\'s', n=[1, (2, None)]), g()]", "", [("f", '{"a": "it\'s", "n": [1, [2, null]]}'), ("g", "{}")]),
    ("pythonic", '<|python_start|>[f(a={"k": True,}, n=1_000)]<|python_end|>', "", [("f", '{"a": {"k": true}, "n": 1000}')]),
    ("pythonic", "<function_calls>f(a='x')\ng()</function_calls>", "", [("f", '{"a": "x"}'), ("g", "{}")]),
    ("pythonic", "[f(a=other(1))]", "", [("f", '{"a": "other(1)"}')]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "Sure: [f(a=1)]", "Sure: [f(a=1)]", []),
    ("mistral", 'Hi[TOOL_CALLS] [{"arguments": {"name": "x"}, "name": "f"}, {"name": "g"}]</s>', "Hi", [("f", '{"name": "x"}'), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}', "", [("f", '{"a": "[TOOL_CALLS]"}'), ("g", "{}")]),
    ("mistral", "[TOOL_CALLS] no call", "[TOOL_CALLS] no call", []),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"n": 1}}, {"name": "g"}]', "", [("f", '{"n": 1}'), ("g", "{}")]),
    ("granite", '<function_call> {"name": "g", "arguments": {}}', "", [("g", "{}")]),
    ("granite", '<tool_call>{"name": "g"}</tool_call><|end_of_text|>', "", [("g", "{}")]),
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {"n": 1}}, {"name": "g"}]', "", [("f", '{"n": 1}'), ("g", "{}")]),
    ("phi4_mini_json", "import functools", "import functools", []),
    ("deepseek_v3", f'Hi{CALLS_BEGIN}{BEGIN}function{SEPARATOR}f\n```json\n{{"a": "```"}}\n```{END}\n{BEGIN}function{SEPARATOR}g\n```json\n{{}}\n```{END}{CALLS_END}', "Hi", [("f", '{"a": "```"}'), ("g", "{}")]),
    ("deepseek_v31", f'{CALLS_BEGIN}{BEGIN}f{SEPARATOR}{{"a": "{END}"}}{END}{BEGIN}g{SEPARATOR}{{}}{END}{CALLS_END}', "", [("f", f'{{"a": "{END}"}}'), ("g", "{}")]),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>g</tool_call>", "", [("f", '{"a": "1", "n": 1}'), ("g", "{}")]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>", "", [("f", '{"a": "x"}')]),
    ("qwen3_xml", XML.format("1") + "\n" + XML.format("x\n"), "", [("f", '{"a": "1"}'), ("f", '{"a": "x\\n"}')]),
    ("qwen3_xml", XML.format("a </parameter> <parameter=n> b"), "", [("f", '{"a": "a </parameter> <parameter=n> b"}')]),
    ("qwen3_xml", "a<function=f><parameter=n>7</parameter></function></tool_call>b", "ab", [("f", '{"n": 7}')]),
    ("qwen3_xml", "<tool_call><function=f>\n<parameter=a>\nx\n<parameter=n>\n1\n</function></tool_call>", "", [("f", '{"a": "x", "n": 1}')]),
    ("qwen3_xml", "<tool_call>\n<function=g>\n</function>\n</tool_call>", "", [("g", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("tool_parser", "text", "content", "calls"), GOOD)
def test_a_format_is_read(tool_parser: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(tool_parser, text) == Parsed(content, "", calls)


UNKNOWN = [
    ("llama3_json", '{"name": "other", "parameters": {"a": 1}} so'),
    ("pythonic", "[other(a=1), f(a=2)] so"),
    ("mistral", '[TOOL_CALLS]other[ARGS]{"a": "[TOOL_CALLS]f[ARGS]{}"} so'),
    ("mistral", '[TOOL_CALLS][{"name": "other", "arguments": {}}] so'),
    ("granite", '<|tool_call|>[{"name": "other", "arguments": {"a": 1}}] so'),
    ("phi4_mini_json", 'functools[{"name": "other", "arguments": {"a": 1}}] so'),
    ("deepseek_v31", f'{BEGIN}other{SEPARATOR}{{"a": "{BEGIN}f{SEPARATOR}"}}{END} so'),
    ("deepseek_v3", f'{BEGIN}function{SEPARATOR}other\n```json\n{{"a": 1}}\n```{END} so'),
    ("glm45", "<tool_call>other<arg_key>a</arg_key><arg_value>1</arg_value></tool_call> so"),
    ("qwen3_xml", XML.format("1").replace("=f>", "=other>") + " so"),
]


@pytest.mark.parametrize(("tool_parser", "text"), UNKNOWN)
def test_a_call_of_an_unknown_function_is_content_as_it_was_written(tool_parser: str, text: str) -> None:
    assert parse(tool_parser, text) == Parsed(text, "", [])


CUT = [
    ("llama3_json", '{"name": "f", "parameters": {"a": "x', '{"a": "x'),
    ("pythonic", "[f(a='x', n=", '{"a": "x"'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "x', '{"a": "x'),
    ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": ', '{"a": '),
    ("phi4_mini_json", 'functools[{"name": "f", "argum', ""),
    ("deepseek_v31", f"{CALLS_BEGIN}{BEGIN}f{SEPARATOR}", None),
    ("deepseek_v3", f'{CALLS_BEGIN}{BEGIN}function{SEPARATOR}f\n```json\n{{"a"', '{"a"'),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value><arg_key>n", '{"a": "x"'),
    ("glm45", "<tool_call>", None),
    ("qwen3_xml", "<tool_call>\n<function=f>\n<parameter=a>\nrm -rf /", ""),
    ("openai", '<|channel|>commentary to=functions.f<|message|>{"a"', '{"a"'),
]


@pytest.mark.parametrize(("tool_parser", "text", "arguments"), CUT)
def test_a_truncated_call_is_reported_so_far_and_leaves_no_tag(
    tool_parser: str, text: str, arguments: str | None
) -> None:
    assert parse(tool_parser, text) == Parsed("", "", [] if arguments is None else [("f", arguments)])


HARMONY = [
    ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>", Parsed("Hi.", "hm", [])),
    ("<|channel|>commentary<|message|>Now.<|end|><|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{\"a\": \"<|call|>\"}<|call|>", Parsed("Now.", "", [("f", '{"a": "<|call|>"}')])),
    ("<|channel|>commentary to=functions.g <|constrain|>json<|message|><|call|>", Parsed("", "", [("g", "{}")])),
    ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", Parsed("{}", "", [])),
    ("<|channel|>??<|end|><|start|>assistant<|channel|>analysis<|message|>hm", Parsed("", "hm", [])),
    ("<|channel|>analysis to=functions.f<|end|><|start|>assistant<|channel|>final<|message|>Hi.", Parsed("Hi.", "", [])),
    ("Plain text.", Parsed("Plain text.", "", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), HARMONY)
def test_messages_of_gpt_oss_are_distinguished_by_their_headers(text: str, expected: Parsed) -> None:
    assert parse("openai", text, "openai") == expected


def test_calls_of_gpt_oss_are_content_without_a_tool_parser() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert parse(None, text, "openai") == Parsed("{}", "", [])


def test_in_xml_formats_a_call_ends_the_reasoning() -> None:
    assert parse("qwen3_xml", f"hm\n{XML.format('1')}\n</think>\nHi", "think", "<think>\n") == Parsed(
        "Hi", "hm", [("f", '{"a": "1"}')]
    )
    text = 'hm <tool_call>{"name": "f"}</tool_call> hm'
    assert parse("hermes", f"{text}</think>Hi", "think", "<think>\n") == Parsed("Hi", text, [])


def test_mistral_may_think_between_either_kind_of_tags() -> None:
    for text in ("[THINK]hm</think>[/THINK]Hi", "<think>hm</think></think>Hi"):
        parsed = parse("mistral", text, "mistral")
        assert parsed.content.endswith("Hi")
        assert parsed.reasoning.startswith("hm")


def test_arguments_in_a_string_are_decoded_and_null_is_an_empty_object() -> None:
    text = (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name": "g", "arguments": null}'
    )
    assert parse("hermes", text).calls == [("f", '{"a": 1}'), ("g", "{}")]


TYPES = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "u": {"type": ["string", "null"]},
    "y": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "e": {"enum": ["1", "2"]},
    "any": {},
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("s", "02139", "02139"),
        ("s", " null ", " null "),
        ("s", '"quoted"', '"quoted"'),
        ("i", "12", 12),
        ("i", "1.5", "1.5"),
        ("i", "many", "many"),
        ("b", "True", True),
        ("o", "{'k': None}", {"k": None}),
        ("o", '{"k": NaN}', '{"k": NaN}'),
        ("u", "null", None),
        ("u", "x", "x"),
        ("y", "5", 5),
        ("y", "five", "five"),
        ("e", "1", "1"),
        ("any", "[1, 2]", [1, 2]),
        ("any", "hello", "hello"),
        ("unknown", "1e20", 1e20),
        ("o", "[" * 100_000, "[" * 100_000),
    ],
)
def test_text_is_converted_by_the_types_of_its_parameter(name: str, text: str, value: object) -> None:
    tools = [Function(name="f", parameters={"type": "object", "properties": TYPES})]
    written = f"<tool_call>f<arg_key>{name}</arg_key><arg_value>{text}</arg_value></tool_call>"
    [(_, arguments)] = parse("glm45", written, tools=tools).calls
    assert json.loads(arguments) == {name: value}


def test_an_invalid_parameter_schema_allows_any_type() -> None:
    for parameters in (
        {"properties": 5},
        {"properties": {"a": True}},
        {"properties": {"a": {"type": 1, "anyOf": [1]}}},
    ):
        written = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        assert parse("glm45", written, tools=[Function(name="f", parameters=parameters)]).calls == [("f", '{"a": 1}')]


def test_every_tool_parser_has_a_case_here() -> None:
    assert {name for name, *_ in GOOD} | {"openai"} == TOOL_PARSERS


def test_unknown_parser_names_are_refused() -> None:
    with pytest.raises(UnknownParserError, match=r"tool_parser must be one of deepseek_v3, .*, got 'kimi'"):
        make_parser("kimi", None, tools=(), prompt_tail=None)
    with pytest.raises(UnknownParserError, match="reasoning_parser must be one of mistral, openai, think, got 'x'"):
        make_parser(None, "x", tools=(), prompt_tail=None)
    with pytest.raises(UnknownParserError, match="reasoning_parser must be openai or none, got 'think'"):
        make_parser("openai", "think", tools=(), prompt_tail=None)


@pytest.mark.parametrize(
    ("tool_parser", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("llama3_json", '{"name": "f"}'),
        ("phi4_mini_json", 'functools[{"name": "f"}]'),
    ],
)
def test_a_model_may_call_at_once_although_the_prompt_opened_its_reasoning(tool_parser: str, text: str) -> None:
    assert parse(tool_parser, text, "think", "<think>\n") == Parsed("", "", [("f", "{}")])


def test_a_forced_call_of_gpt_oss_is_read_in_the_format_of_the_grammar() -> None:
    assert parse("hermes", '<tool_call>{"name": "f"}</tool_call>', "openai") == Parsed("", "", [("f", "{}")])
