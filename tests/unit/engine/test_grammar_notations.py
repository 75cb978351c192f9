"""The notations of `grammar`: which is meant, and that a grammar allows the right texts and no others."""

from __future__ import annotations

import json

import pytest

from headrace_engine.grammar.errors import GrammarError
from headrace_engine.grammar.gbnf import is_gbnf
from headrace_engine.grammar.grammar import GrammarCompiler, TokenizerDefinition
from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams
from unit.engine.fake_runner import EOS as LETTERS_EOS
from unit.engine.letters import CHARACTERS, tokenizer_json

EOS = 256


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return byte_compiler()


def byte_compiler() -> GrammarCompiler:
    """A tokenizer with a token for each byte, so that every text can be written."""
    values = json.loads(tokenizer_json())
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    values["model"]["vocab"] = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    assert len(CHARACTERS) > LETTERS_EOS
    values["model"]["vocab"]["<eos>"] = EOS
    values["added_tokens"][0]["id"] = EOS
    definition = TokenizerDefinition(tokenizer_json=json.dumps(values).encode(), vocab_size=257, eos_token_ids=[EOS])
    return GrammarCompiler(definition)


def allows(compiler: GrammarCompiler, text: str, **form: object) -> bool:
    grammar = compiler.compile(StructuredOutputsParams(**form))  # type: ignore[arg-type]
    for token_id in [*text.encode(), EOS]:
        if not grammar.bitmasks()[0][token_id >> 3] >> (token_id & 7) & 1:
            return False
        if token_id != EOS:
            grammar.accept([token_id])
    return True


LARK = [
    ('?start: "a" | start "b"', ["a", "abb"], ["b", ""]),
    ('!start: "a"', ["a"], ["b"]),
    ('// a comment\n?start: "a"', ["a"], ["b"]),
    ('# root ::= "b"\nstart: "a"', ["a"], ["b"]),
    ('x: "a"\n?start: x', ["a"], ["b"]),
    ("%import common.INT\n?start: INT", ["12"], ["a"]),
    ('%import common.WS\n%ignore WS\n?start: "a" "b"', ["ab", "a b"], ["ac"]),
    ('_x: "a"\n?start: _x+', ["aa"], ["b"]),
    ('start: "caf\\u00e9"', ["café"], ["cafe"]),
    ('start: "x ::= y"', ["x ::= y"], ["x"]),
]
GBNF = [
    ('root ::= "caf\\u00e9"', ["café"], ["cafe"]),
    ('root ::= "caf\\xe9"', ["café"], ["cafe"]),
    ('root ::= "\\U0001F600"', ["😀"], ["x"]),
    ('root ::= "\\u0041\\x0a\\u001b"', ["A\n\x1b"], ["A"]),
    ('root ::= "a\\"b\\\\c\\n\\t\\r"', ['a"b\\c\n\t\r'], ["a"]),
    ('root ::= "a/b" [/]', ["a/b/"], ["a/b"]),
    ("root ::= [\\u00e0-\\u00ff]+", ["é"], ["e"]),
    ("root ::= [\\xe0-\\xff]+", ["é"], ["e"]),
    ("root ::= [\\U0001F600-\\U0001F64F]", ["😀"], ["x"]),
    ("root ::= [\\u0041-\\u005a]+", ["AZ"], ["a", "["]),
    ('root ::= [^"\\\\\\x7F\\x00-\\x1F]+', ["é a"], ['"', "\n", "\\"]),
    ("root ::= [a\\]b\\-]+", ["a]b-"], ["c", "^"]),
    ("root ::= [ab-]+ [a&&b] [a~~b] [+--]", ["a-&~,", "bab-"], ["aaaa"]),
    ("root ::= [^a^]+ [[a]", ["b[", "ca"], ["a[", "^["]),
    ("root ::= .", ["a", "é", "\n"], ["ab", ""]),
    ("root ::= [a-z]{2} [0-9]{,2} [x]{1,}", ["abx", "ab12xx"], ["ax", "ab123x"]),
    ('root ::= "a"\n  | "b"\n  | "c"', ["a", "b", "c"], ["d"]),
    ('root ::=\n  "a" |\n  "b"', ["a", "b"], ["c"]),
    ('root ::= (\n "a"\n | "b"\n) "c"\n', ["ac", "bc"], ["a"]),
    ('# root\nroot ::= "a" # "b"\n\n  # more\n', ["a"], ["b"]),
    ('x ::= "a"\n  root ::= x x\n', ["aa"], ["a"]),
    ('root ::= foo-bar foo_bar Foo-bar\nfoo-bar ::= "x"\nfoo_bar ::= "y"\nFoo-bar ::= "z"', ["xyz"], ["xxx"]),
    ('root ::= start 1st _ws\nstart ::= "x"\n1st ::= "y"\n_ws ::= " "*', ["xy", "xy  "], ["x"]),
    ('root ::= a "x"\na ::= "x"*', ["x", "xxx"], ["", "y"]),
    ("root ::= a b\na ::= [a-z]+\nb ::= [a-z0-9]", ["ab", "a1"], ["a", "1"]),
    ('root ::= "start: x"', ["start: x"], ["x"]),
    ('root ::= "(" root ")" | "\\u00e9"', ["é", "((é))"], ["(é", "e"]),
    ('root ::= "" | "a"', ["", "a"], ["b"]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), LARK + GBNF)
def test_a_grammar_allows_the_right_texts_and_no_others(
    compiler: GrammarCompiler, grammar: str, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not allows(compiler, text, grammar=grammar)] == []
    assert [text for text in bad if allows(compiler, text, grammar=grammar)] == []


REGEXES = [
    (r"\d+", ["12"], ["٣", "x"]),
    (r"\D", ["x", "٣"], ["1"]),
    (r"\w+", ["a_1"], ["é", "-"]),
    (r"\W", ["é", "-"], ["a", "_"]),
    (r"[\d.]+[^\w]", ["1.2-", "1.é"], ["1.2a", "٣-"]),
    (r"\s", [" ", "\u00a0"], ["a"]),
    (r"\\d/", ["\\d/"], ["1/"]),
    (r"\p{Nd}", ["٣", "1"], ["x"]),
]


@pytest.mark.parametrize(("regex", "good", "bad"), REGEXES)
def test_a_regular_expression_means_the_same_wherever_it_stands(
    compiler: GrammarCompiler, regex: str, good: list[str], bad: list[str]
) -> None:
    in_lark = regex.replace("/", r"\/").replace(r"\\/", r"\/")
    for text in [*good, *bad]:
        allowed = text in good
        assert allows(compiler, text, regex=regex) == allowed, text
        assert allows(compiler, text, grammar=f"start: x\nx: /{in_lark}/ // a/b") == allowed, text
        schema = {"type": "string", "pattern": f"^({regex})$"}
        assert allows(compiler, json.dumps(text, ensure_ascii=False), json=schema) == allowed, text


def test_options_of_one_of_may_be_told_apart_by_a_constant(compiler: GrammarCompiler) -> None:
    options = [
        {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"], "additionalProperties": False}
        for kind in "ab"
    ]
    assert allows(compiler, '{"kind":"b"}', json={"oneOf": options})
    assert not allows(compiler, '{"kind":"c"}', json={"oneOf": options})


@pytest.mark.parametrize("grammar", [grammar for grammar, _, _ in LARK])
def test_only_a_rule_of_gbnf_makes_a_grammar_gbnf(grammar: str) -> None:
    assert not is_gbnf(grammar)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "\\ud800"', r"\ud800 stands for no character"),
        ('root ::= "\\UFFFFFFFF"', r"\UFFFFFFFF stands for no character"),
        ("root ::= [\\d]", r"\d stands for no character"),
        ("root ::= missing", "'missing' not found"),
        ('root ::= ( "a"', "Expected ')'"),
        ("root ::= a:b", "root ::= a' ^ ':b'"),
        ('x ::= "a"', "no rule root"),
        ("nonsense", "start"),
        ('x: "a"', "start"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said(compiler: GrammarCompiler, grammar: str, reason: str) -> None:
    with pytest.raises(GrammarError) as refused:
        compiler.compile(StructuredOutputsParams(grammar=grammar))
    assert reason in str(refused.value)
