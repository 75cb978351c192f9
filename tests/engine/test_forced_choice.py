"""The grammars of forced choices, compiled and walked as the engine does it, and read back by their parsers."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken

from engine.tokenizer_kinds import byte_level
from headrace_engine import LLM, SamplingParams
from headrace_engine.grammar.errors import GrammarError
from headrace_engine.grammar.grammar import Grammar, GrammarCompiler, TokenizerDefinition
from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams
from headrace_gateway.chat.forced_choice import MAX_PARALLEL_CALLS, ForcedChoice, forced_choice, strict_calls
from headrace_gateway.errors import ForcedChoiceError
from headrace_gateway.requests.call import Function
from unit.gateway.parsers.parsing import Parsed, events_of, folded

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/grammar", "gateway/headrace_gateway/chat", "gateway/headrace_gateway/parsers"
)

WEATHER = Function(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", 'Zürich </tool_call> "', "東京"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "note": {"type": "string", "maxLength": 5},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = Function(name="clock")
TOOLS = (WEATHER, CLOCK)
SYNTAXES = ("hermes", "llama3_json", "phi4_mini_json", None)


class Walker:
    """Walks at random through what a grammar allows, with a real tokenizer."""

    def __init__(self, *added: AddedToken) -> None:
        self.tokenizer = byte_level()
        self.tokenizer.add_tokens([*added])
        self.vocab_size = self.tokenizer.get_vocab_size()
        self.end = self.tokenizer.token_to_id("</s>")
        self.compiler = GrammarCompiler(
            TokenizerDefinition(
                tokenizer_json=self.tokenizer.to_str().encode(), vocab_size=self.vocab_size, eos_token_ids=[self.end]
            )
        )

    def grammar(self, choice: ForcedChoice) -> Grammar:
        return self.compiler.compile(StructuredOutputsParams(grammar=choice.grammar))

    def walk(self, choice: ForcedChoice, seed: int) -> str:
        grammar, draw = self.grammar(choice), random.Random(seed)
        token_ids: list[int] = []
        while len(token_ids) < 3000:
            mask = grammar.bitmasks()[0]
            allowed = [index for index in range(self.vocab_size) if mask[index // 8] >> index % 8 & 1]
            if self.end in allowed and (len(allowed) == 1 or draw.random() < 0.5):
                return self.tokenizer.decode(token_ids)
            chosen = draw.choice([index for index in allowed if index != self.end])
            grammar.accept([chosen])
            token_ids.append(chosen)
        raise AssertionError("the grammar does not end")

    def allows(self, choice: ForcedChoice, text: str) -> bool:
        grammar = self.grammar(choice)
        try:
            grammar.accept(self.tokenizer.encode(text).ids)
            return bool(grammar.bitmasks()[0][self.end // 8] >> self.end % 8 & 1)
        except GrammarError:
            return False


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker()


def read_back(
    choice: ForcedChoice,
    text: str,
    tools: Sequence[Function],
    reasoning: str | None = None,
    prompt_tail: str | None = None,
) -> Parsed:
    return folded(events_of(choice.syntax, [text], reasoning, prompt_tail, tools=tools))


@pytest.mark.parametrize("tool_parser", SYNTAXES)
@pytest.mark.parametrize("parallel", [True, False])
def test_whatever_the_grammar_allows_is_read_back_as_valid_calls(
    walker: Walker, tool_parser: str | None, parallel: bool
) -> None:
    choice = forced_choice(TOOLS, tool_parser=tool_parser, parallel=parallel)
    schemas: dict[str, Mapping[str, Any]] = {"get_weather": WEATHER.parameters or {}, "clock": {"maxProperties": 0}}
    counts = set()
    for seed in range(12):
        text = walker.walk(choice, seed)
        content, reasoning, calls = read_back(choice, text, TOOLS)
        assert (content, reasoning) == ("", ""), text
        assert calls, text
        counts.add(len(calls))
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[name])
    assert max(counts) <= (MAX_PARALLEL_CALLS if parallel else 1)
    assert not parallel or len(counts) > 1


def test_other_functions_and_arguments_are_refused(walker: Walker) -> None:
    choice = forced_choice(TOOLS, tool_parser="hermes")
    good = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert walker.allows(choice, good)
    assert walker.allows(choice, f"{good}\n{good}")
    for bad in (
        good.replace("clock", "other"),
        good.replace("{}", '{"a": 1}'),
        good.replace("clock", "get_weather"),
        f"Sure: {good}",
        f"{good} so",
        "",
    ):
        assert not walker.allows(choice, bad), bad
    assert not walker.allows(forced_choice(TOOLS, tool_parser="hermes", parallel=False), f"{good}\n{good}")
    assert not walker.allows(forced_choice([WEATHER], tool_parser="hermes"), good)


def test_tags_that_are_tokens_of_the_model_are_written_as_these_tokens() -> None:
    """Qwen3's tokenizer has them between special tokens, and they are not special."""
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    qwen = Walker(AddedToken("<|im_end|>", special=True), *(AddedToken(tag, special=False) for tag in tags))
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert {"<tool_call>", "</tool_call>"} < set(qwen.tokenizer.encode(call).tokens)
    forced = forced_choice([CLOCK], tool_parser="hermes", reasoning_parser="think", prompt_tail="<think>\n")
    assert qwen.allows(forced, f"hm</think>\n\n{call}")
    assert not qwen.allows(forced, f"hm<|im_end|></think>\n\n{call}")
    strict = strict_calls([Function(name="clock", strict=True)], tool_parser="hermes")
    assert strict is not None
    auto = ForcedChoice(strict, "hermes")
    assert qwen.allows(auto, f"It is <b>late</b>. {call}")
    assert not qwen.allows(auto, f"It is late. {call.replace('{}', '{1}')}")
    assert not qwen.allows(auto, f"It is <|im_end|> {call}")


@pytest.mark.parametrize(
    ("prompt_tail", "good", "bad"),
    [
        ("assistant\n<think>\n", ["hm</think>\n\n", "</think>"], ["", "<think>hm"]),
        ("assistant\n", ["<think>hm</think>", ""], ["hm</think>"]),
        ("<think>\n\n</think>\n\n", [""], ["<think>hm</think>", "hm</think>"]),
        (None, ["<think>hm</think>\n", "hm</think>\n\n", "hm", ""], ["<think>hm", "<b>"]),
    ],
)
def test_a_model_that_thinks_may_think_first(
    walker: Walker, prompt_tail: str | None, good: list[str], bad: list[str]
) -> None:
    choice = forced_choice([CLOCK], tool_parser="hermes", reasoning_parser="think", prompt_tail=prompt_tail)
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert all(walker.allows(choice, before + call) for before in good)
    assert not any(walker.allows(choice, before + call) for before in bad)


@pytest.mark.parametrize("tool_parser", SYNTAXES)
def test_a_model_whose_prompt_is_unknown_may_think_and_must_call(walker: Walker, tool_parser: str | None) -> None:
    choice = forced_choice([CLOCK], tool_parser=tool_parser, reasoning_parser="think", parallel=False)
    [call] = {walker.walk(forced_choice([CLOCK], tool_parser=tool_parser, parallel=False), seed) for seed in range(3)}
    for before, tail in (("", "<think>"), ("<think>f</think>\n", None), ("hm</think>\n\n", "<think>\n")):
        assert walker.allows(choice, before + call)
        parsed = read_back(choice, before + call, [CLOCK], "think", tail)
        assert parsed.calls == [("clock", "{}")]
        assert parsed.content == ""
    assert not walker.allows(choice, "hm</think>")


def test_parameters_that_are_not_given_allow_an_empty_object_only_and_any_others_an_object(walker: Walker) -> None:
    def call(arguments: str) -> str:
        return f'<tool_call>\n{{"name": "clock", "arguments": {arguments}}}\n</tool_call>'

    anything = forced_choice([Function(name="clock", parameters={})], tool_parser=None)
    assert walker.allows(anything, call('{"a": [1]}'))
    assert not walker.allows(anything, call("[1]"))
    assert not walker.allows(forced_choice([CLOCK], tool_parser=None), call('{"a": 1}'))


def test_a_strict_function_refuses_keywords_that_the_engine_lacks_and_another_ignores_them(walker: Walker) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    walker.grammar(forced_choice([Function(name="f", parameters=parameters)], tool_parser=None))
    with pytest.raises(GrammarError):
        walker.grammar(forced_choice([Function(name="f", parameters=parameters, strict=True)], tool_parser=None))


def test_functions_that_make_no_grammar_are_an_error_with_the_way_out() -> None:
    with pytest.raises(ForcedChoiceError, match="at least one function"):
        forced_choice([], tool_parser="hermes")
    large = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(3000)}}
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ForcedChoiceError, match="the parameters of function 'f' are nested too deeply"):
        forced_choice([Function(name="f", parameters=deep)], tool_parser=None)
    with pytest.raises(ForcedChoiceError, match=r"at most 65536 bytes, got \d+: allow fewer"):
        forced_choice([Function(name="f", parameters=large)], tool_parser=None)


def test_descriptions_take_no_room_and_values_and_names_like_them_stay(walker: Walker) -> None:
    parameters = {
        "description": "long " * 20_000,
        "properties": {
            "title": {"title": "T", "const": {"title": "x"}},
            "description": {"type": "integer", "description": "a number"},
        },
        "required": ["title", "description"],
        "additionalProperties": False,
    }
    tool = Function(name="f", parameters=parameters)
    choice = forced_choice([tool], tool_parser=None, parallel=False)
    call = '<tool_call>\n{"name": "f", "arguments": {"title": {"title": "x"}, "description": 1}}\n</tool_call>'
    assert walker.allows(choice, call)
    assert not walker.allows(choice, call.replace('"x"', '"y"'))
    assert not walker.allows(choice, call.replace("1}", '"1"}'))


def test_names_and_schemas_with_any_characters_stay_texts_in_the_grammar(walker: Walker) -> None:
    parameters = {"properties": {'a"\n/x/ # ::= "': {"const": "//é\nroot ::= x"}}, "required": ['a"\n/x/ # ::= "']}
    tool = Function(name='f"\\\n%json {', parameters=parameters)
    choice = forced_choice([tool], tool_parser=None, parallel=False)
    text = walker.walk(choice, 1)
    [(name, arguments)] = read_back(choice, text, [tool]).calls
    assert name == tool.name
    assert json.loads(arguments)['a"\n/x/ # ::= "'] == "//é\nroot ::= x"


STRICT = Function(name="clock", strict=True)


def test_a_strict_function_binds_calls_and_leaves_other_text_free(walker: Walker) -> None:
    grammar = strict_calls([Function(name="f"), STRICT], tool_parser="hermes")
    assert grammar is not None
    choice = ForcedChoice(grammar, "hermes")
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    free = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for good in ("", "Hi <b>there</b> <tool", f"Let me see.\n{call}", f"{free}\n{call}\nso"):
        assert walker.allows(choice, good), good
    for bad in (call.replace("{}", '{"a": 1}'), call.replace("clock", "other"), "<tool_call>", f"{call}<tool_call>x"):
        assert not walker.allows(choice, bad), bad
    one = strict_calls([STRICT], tool_parser="hermes", parallel=False)
    assert one is not None
    assert not walker.allows(ForcedChoice(one, "hermes"), f"{call}\n{call}")


def test_without_a_strict_function_or_a_tag_that_is_text_nothing_is_bound() -> None:
    assert strict_calls(TOOLS, tool_parser="hermes") is None
    assert strict_calls([STRICT], tool_parser="mistral") is None


@pytest.mark.parametrize("tool_parser", ["hermes", "llama3_json"])
def test_a_model_that_knows_no_tools_calls_when_it_must(
    tool_parser: str, default_model_in: Callable[[str], Path]
) -> None:
    llm = LLM(str(default_model_in("bfloat16")), max_model_len=600, block_size=16, num_blocks=160, max_num_seqs=4)
    try:
        choice = forced_choice(TOOLS, tool_parser=tool_parser, parallel=False)
        params = SamplingParams(
            n=4,
            temperature=1.0,
            seed=3,
            max_tokens=200,
            structured_outputs=StructuredOutputsParams(grammar=choice.grammar),
        )
        [output] = llm.chat([[{"role": "user", "content": "Is it warm in Paris?"}]], params)
        for written in output.outputs:
            assert written.finish_reason == "stop"
            parsed = read_back(choice, written.text, TOOLS)
            assert parsed.content == ""
            [(name, arguments)] = parsed.calls
            jsonschema.validate(
                json.loads(arguments), (WEATHER.parameters or {}) if name == "get_weather" else {"maxProperties": 0}
            )
    finally:
        llm.close()
