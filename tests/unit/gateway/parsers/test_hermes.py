"""Hermes calls, and reasoning before them."""

from headrace_gateway.parsers.events import Content
from headrace_gateway.parsers.registry import make_parser
from unit.gateway.parsers.parsing import TOOLS, Parsed, folded, parse


def test_calls_follow_each_other_and_white_space_around_them_is_dropped() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>"}}\n</tool_call>'
    text = f'Hi.\n{call}\n<tool_call>{{"name":"g"}}</tool_call>\n'
    assert parse("hermes", text) == Parsed("Hi.", "", [("f", '{"a": "}</tool_call>"}'), ("g", "{}")])


def test_arguments_before_the_name_are_held_until_it_arrives() -> None:
    text = '<tool_call>{"arguments": {"name": "x"}, "name": "g"}</tool_call>'
    assert parse("hermes", text) == Parsed("", "", [("g", '{"name": "x"}')])


def test_a_call_of_an_unknown_function_is_content_as_it_was_written() -> None:
    text = '<tool_call>\n{"name": "other", "arguments": {"q": "<tool_call>{\\"name\\": \\"f\\"}"}}\n</tool_call> so'
    assert parse("hermes", text) == Parsed(text, "", [])


def test_text_in_the_tags_that_is_not_a_call_is_content() -> None:
    text = "<tool_call>no JSON</tool_call> so"
    assert parse("hermes", text) == Parsed(text, "", [])


def test_a_call_truncated_in_its_arguments_is_reported_so_far() -> None:
    assert parse("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b') == Parsed("", "", [("f", '{"a": "b')])


def test_a_call_truncated_before_its_name_leaves_no_tag() -> None:
    assert parse("hermes", 'Hi.\n<tool_call>\n{"name": "f') == Parsed("Hi.", "", [])


def test_a_call_with_missing_braces_ends_at_its_tag() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> then'
    assert parse("hermes", text) == Parsed(" then".strip(), "", [("f", '{"a": 1')])


def test_a_string_of_arguments_with_a_lone_surrogate_is_passed_on_unchanged() -> None:
    written = r'"{\"a\": \"\ud83d\"}"'
    text = f'<tool_call>{{"name":"f","arguments":{written}}}</tool_call>'
    assert parse("hermes", text) == Parsed("", "", [("f", written)])


def test_a_call_whose_name_has_a_lone_surrogate_is_content() -> None:
    text = r'<tool_call>{"name": "\ud83d"}</tool_call>'
    assert parse("hermes", text).content.startswith(r'<tool_call>{"name": "\ud83d"')


def test_special_tokens_are_not_shown() -> None:
    assert parse("hermes", "Hi.<|im_end|>") == Parsed("Hi.", "", [])


def test_without_parallel_calls_everything_after_the_first_call_is_dropped() -> None:
    text = 'a<tool_call>{"name": "f"}</tool_call>b<tool_call>{"name": "g"}</tool_call>'
    assert parse("hermes", text, parallel=False) == Parsed("a", "", [("f", "{}")])


def test_reasoning_comes_before_the_answer() -> None:
    text = '<think>\nhm\n</think>\n\nHi <think>\n<tool_call>{"name": "f"}</tool_call>'
    assert parse("hermes", text, "think") == Parsed("Hi <think>", "hm", [("f", "{}")])


def test_reasoning_continues_if_the_prompt_has_opened_it() -> None:
    assert parse(None, "hm</think>yes", "think", "assistant\n<think>\n") == Parsed("yes", "hm", [])
    assert parse(None, "hm", "think", "<think>") == Parsed("", "hm", [])


def test_a_closing_tag_is_text_if_nothing_opened_the_reasoning() -> None:
    for tail in (None, "<think>\n\n</think>\n\n"):
        assert parse("hermes", " hm</think>yes", "think", tail) == Parsed(" hm</think>yes", "", [])


def test_without_tools_a_call_is_content() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert parse("hermes", text, tools=()) == Parsed(text, "", [])


def test_only_a_possible_tag_and_white_space_before_a_call_are_held_back() -> None:
    parser = make_parser("hermes", "think", tools=TOOLS, prompt_tail=None)
    text = "a <b> c <tool_cal" * 3 + " " * 200 + "<tool_call"
    reported = 0
    for number, character in enumerate(text, start=1):
        reported += sum(len(event.text) for event in parser.feed(character) if isinstance(event, Content))
        assert number - reported <= 64 + len("<tool_call>")
    assert folded(parser.finish()).content.endswith("<tool_call")


def test_only_the_end_of_a_long_run_of_white_space_before_a_call_is_dropped() -> None:
    parsed = parse("hermes", "a" + " " * 100 + '<tool_call>{"name": "f"}</tool_call>')
    assert parsed == Parsed("a" + " " * 36, "", [("f", "{}")])
