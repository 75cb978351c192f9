"""Grammars: which tokens they allow, what they refuse, and how much they keep."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tokenizers import AddedToken

from engine.tokenizer_kinds import byte_level
from headrace_engine.grammar import grammar as grammar_module
from headrace_engine.grammar.errors import GrammarError, sentence
from headrace_engine.grammar.grammar import Grammar, GrammarCompiler, TokenizerDefinition
from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams
from unit.engine.fake_runner import EOS, VOCAB_SIZE
from unit.engine.letters import decode, encode, tokenizer_json


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(
        TokenizerDefinition(tokenizer_json=tokenizer_json().encode(), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    )


def allowed(mask: bytes) -> list[int]:
    return [token_id for token_id in range(8 * len(mask)) if mask[token_id >> 3] >> (token_id & 7) & 1]


def fill(grammar: Grammar, text: str) -> None:
    for token_id in encode(text):
        assert token_id in allowed(grammar.bitmasks()[0])
        grammar.accept([token_id])


def follows(grammar: Grammar, text: str) -> bool:
    """Whether the grammar allows this whole text, and an end behind it."""
    grammar = grammar.copy()
    for token_id in encode(text):
        if token_id not in allowed(grammar.bitmasks()[0]):
            return False
        grammar.accept([token_id])
    return EOS in allowed(grammar.bitmasks()[0])


@pytest.mark.parametrize(
    ("values", "good", "bad"),
    [
        ({"regex": "a{2}|ab*"}, ["aa", "a", "abbb"], ["", "aab", "b"]),
        ({"choice": ["yes", "no", "a.b", 'a"b']}, ["yes", "no", "a.b", 'a"b'], ["y", "yesno", "aab"]),
        ({"json": {"enum": [1, "a"]}}, ["1", '"a"'], ["a", "2"]),
        ({"json": {"type": "array", "items": {"type": "integer"}}}, ["[]", "[1,2]"], ['["a"]', "[1,]"]),
        ({"json_object": True}, ["{}", '{"a":{"b":[1]}}'], ["[]", "{"]),
        ({"json": {"type": "array"}, "whitespace_pattern": "%"}, ["[%1,%2%]", "[1,2]"], ["[!1]"]),
        ({"grammar": 'start: "a" start "b" | "!"'}, ["!", "aa!bb"], ["a!", "!b"]),
        ({"grammar": 'root ::= "a" root "b" | "!"'}, ["!", "aa!bb"], ["a!", "!b"]),
    ],
)
def test_exactly_the_texts_of_the_grammar_are_allowed(
    compiler: GrammarCompiler, values: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = compiler.compile(StructuredOutputsParams(**values))
    assert [text for text in good if not follows(grammar, text)] == []
    assert [text for text in bad if follows(grammar, text)] == []


@pytest.mark.parametrize(
    "values",
    [
        {"json": {"enum": [1]}},
        {"regex": "1"},
        {"grammar": 'start: form // a } in a comment\nform: "1" | "}"'},
    ],
)
@pytest.mark.parametrize("special", [True, False, None], ids=["special token", "token", "text"])
def test_a_grammar_begins_after_the_thought_that_the_prompt_has_opened(
    values: dict[str, Any], special: bool | None
) -> None:
    tokenizer = byte_level()
    if special is not None:
        tokenizer.add_tokens([AddedToken(tag, special=special) for tag in ("<think>", "</think>")])
    definition = TokenizerDefinition(
        tokenizer_json=tokenizer.to_str().encode(),
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=[tokenizer.token_to_id("</s>")],
    )
    compiler, params = GrammarCompiler(definition), StructuredOutputsParams(**values)

    def allows(prompt: str, text: str) -> bool:
        grammar = compiler.compile(params, prompt_token_ids=tokenizer.encode(prompt).ids)
        try:
            grammar.accept(tokenizer.encode(text).ids)
        except GrammarError:
            return False
        return tokenizer.token_to_id("</s>") in allowed(grammar.bitmasks()[0])

    for thought in ('I say <b>{"a": 2}, 1', ""):
        assert allows("hello<think>\n", f"{thought}</think>\n\n1")
        assert not allows("hello<think>\n", f"{thought}</think>\n\n2")
    assert not allows("hello<think>\n", "1")
    for prompt in ("<think>\n\n</think>\n", "hello"):
        assert allows(prompt, "1")
        assert not allows(prompt, "a</think>1")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "no text satisfies it"),
        ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"$ref": "http://127.0.0.1/x"}}, "is not present in a registry"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable schema"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text satisfies it"),
        ({"grammar": "start: nobody"}, "unknown name"),
        ({"grammar": "nonsense"}, "Lark with a rule start, or GBNF with a rule root"),
        ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "recursion"),
        ({"json": {}, "whitespace_pattern": "("}, "unclosed group"),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "use anyOf instead"),
        ({"json": {"oneOf": [{}, {}], "x-guidance": {"coerce_one_of": True}}}, "use anyOf instead"),
        ({"json": {"x-guidance": {"own": 1}}}, "x-guidance is not supported"),
        ({"grammar": "start: <|none|>"}, 'unknown special token: "<|none|>"'),
        (
            {"grammar": '{"grammars": [{"json_schema": {"not": {}, "x-guidance": {"lenient": true}}}]}'},
            "expecting rule",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_short_line(
    compiler: GrammarCompiler, values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(GrammarError, match=r".") as refused:
        compiler.compile(StructuredOutputsParams(**values))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert not re.search(r"coerce_one_of|limits\.|fuel|item_separator|<eos>|panic|lenient'", str(refused.value))


@pytest.mark.parametrize(
    "text",
    [
        "lexer error: too many states: 2000 >= 2000\n<non-verbose/>",
        "lexer error: too many expressions constructed",
        "parser error: Too many items (limit 5; ff_tokens); try avoiding single-byte/short lexemes",
        "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable limits.precompute_large",
        "initial lexer configuration (grammar) too big (limit for this grammar: 200000)",
        "fuel exhausted when checking relevance of lexemes (200000)",
    ],
)
def test_a_limit_of_the_library_is_said_in_words_that_its_sender_can_act_on(text: str) -> None:
    assert sentence(text) == "the grammar is too complex: bound its repetitions, or give it fewer alternatives"


def test_masks_behind_drafted_tokens_are_those_of_the_text_with_the_drafts(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="abc|abd|x"))
    masks = grammar.bitmasks([*encode("abc"), EOS])
    assert [decode(allowed(mask)) for mask in masks[:3]] == ["ax", "b", "cd"]
    assert allowed(masks[3]) == [EOS]
    assert len(masks) == 5
    assert decode(allowed(grammar.bitmasks()[0])) == "ax", "the drafts have changed the state"


def test_behind_a_draft_that_is_not_allowed_there_is_still_one_mask_a_position(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="abc"))
    masks = grammar.bitmasks(encode("acb"))
    assert len(masks) == 4
    assert [decode(allowed(mask)) for mask in masks[:2]] == ["a", "b"]
    grammar.accept(encode("ab"))
    assert decode(allowed(grammar.bitmasks()[0])) == "c"


def test_a_token_that_is_not_allowed_is_an_error_for_good(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="ab"))
    with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
        grammar.accept(encode("x"))
    with pytest.raises(GrammarError):
        grammar.bitmasks()


def test_copies_go_their_own_ways(compiler: GrammarCompiler) -> None:
    first = compiler.compile(StructuredOutputsParams(regex="ab|cd"))
    second = first.copy()
    first.accept(encode("a"))
    assert decode(allowed(first.bitmasks()[0])) == "b"
    assert decode(allowed(second.bitmasks()[0])) == "ac"


def test_a_form_serves_any_number_of_outputs(compiler: GrammarCompiler) -> None:
    """Each label has states of its own, and all of them together are far more than an automaton may have."""
    labels = [f"{number * 7919 % 1000:03d}" + "abcdefghijk" * 2 + f"{number:03d}" for number in range(1000)]
    params = StructuredOutputsParams(choice=labels)
    for label in labels:
        grammar = compiler.compile(params)
        fill(grammar, label)
        assert allowed(grammar.bitmasks()[0]) == [EOS]


def test_an_automaton_lasts_for_a_bounded_number_of_tokens(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_SHARED_TOKENS", 4)
    params = StructuredOutputsParams(regex="[ab]{9}")
    first, second = compiler.compile(params), compiler.compile(params)
    assert second._automaton is first._automaton
    second.accept(encode("abab"))
    third = compiler.compile(params)
    assert third._automaton is not first._automaton
    first.accept(encode("bb"))
    assert decode(allowed(first.bitmasks()[0])) == "ab"


def test_outputs_of_an_automaton_that_one_of_them_has_filled_go_on_in_another(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_LEXER_STATES", 60)
    params = StructuredOutputsParams(json={"type": "string", "maxLength": 100})
    greedy, modest = compiler.compile(params), compiler.compile(params)
    modest.accept(encode('"a'))
    greedy.accept(encode('"'))
    with pytest.raises(GrammarError, match="the grammar is too complex"):
        fill(greedy, "b" * 100)
    with pytest.raises(GrammarError):
        modest.bitmasks()
    again = compiler.compile(params, encode('"a'), failed=modest)
    again.bitmasks()
    again.accept(encode("c"))
    assert EOS not in allowed(again.bitmasks()[0])
    again.accept(encode('"'))
    assert allowed(again.bitmasks()[0]) == [EOS]


@pytest.mark.parametrize("length", [10_000, 65_536])
def test_a_counted_text_reaches_its_full_length(compiler: GrammarCompiler, length: int) -> None:
    params = StructuredOutputsParams(json={"type": "string", "maxLength": length})
    grammar, matched, num_renewals = compiler.compile(params), encode('"'), 0
    grammar.accept(matched)
    text = encode("a0-B+")
    while len(matched) <= length:
        some = (text * 8)[: length + 1 - len(matched)]
        try:
            grammar.bitmasks()
            grammar.accept(some)
        except GrammarError:
            grammar = compiler.compile(params, matched, failed=grammar)
            num_renewals += 1
        else:
            matched += some
    mask = allowed(grammar.bitmasks()[0])
    assert decode(mask) == '"', "the text may have no other end"
    assert num_renewals < 25


def test_a_trial_leaves_nothing_behind(compiler: GrammarCompiler) -> None:
    kept = dict(compiler._cache)
    compiler.check(StructuredOutputsParams(regex="[xyz]{7}"))
    with pytest.raises(GrammarError, match="no text satisfies it"):
        compiler.check(StructuredOutputsParams(regex=r"[^\s\S]"))
    assert compiler._cache == kept


def test_padding_of_the_vocabulary_is_never_allowed() -> None:
    definition = TokenizerDefinition(tokenizer_json=tokenizer_json().encode(), vocab_size=100, eos_token_ids=[EOS])
    grammar = GrammarCompiler(definition).compile(StructuredOutputsParams(regex="(?s:.*)"))
    assert max(allowed(grammar.bitmasks()[0])) < VOCAB_SIZE


def test_a_model_with_fewer_tokens_than_its_tokenizer_gets_masks_of_the_tokenizers_width() -> None:
    definition = TokenizerDefinition(tokenizer_json=tokenizer_json().encode(), vocab_size=30, eos_token_ids=[EOS])
    mask = GrammarCompiler(definition).compile(StructuredOutputsParams(regex="a")).bitmasks()[0]
    assert len(mask) == 8


def test_every_end_token_ends_a_complete_text() -> None:
    definition = TokenizerDefinition(
        tokenizer_json=tokenizer_json().encode(), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS, 0]
    )
    grammar = GrammarCompiler(definition).compile(StructuredOutputsParams(regex="a"))
    grammar.accept(encode("a"))
    assert allowed(grammar.bitmasks()[0]) == [0, EOS]


def test_an_unknown_kind_of_tokenizer_is_an_error_and_no_crash() -> None:
    with pytest.raises(GrammarError, match="the model's tokenizer cannot be used with grammars"):
        GrammarCompiler(TokenizerDefinition(tokenizer_json=b"{}", vocab_size=5, eos_token_ids=[1]))


def test_the_cache_of_compiled_grammars_is_bounded_by_their_size(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_CACHED_SOURCE_BYTES", 1000)
    small = GrammarCompiler(
        TokenizerDefinition(tokenizer_json=tokenizer_json().encode(), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    )
    for number in range(50):
        small.compile(StructuredOutputsParams(regex=f"{number}" * 20))
    assert sum(len(source) for source in small._cache) <= 1000
    assert len(small._cache) > 2
    small.compile(StructuredOutputsParams(regex="x" * 2000))
    assert len(small._cache) == 0
