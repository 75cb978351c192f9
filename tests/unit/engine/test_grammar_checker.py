"""The check of grammars: a hostile one costs a bounded time and ends only the process that compiles it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headrace_engine.errors import InvalidRequestError
from headrace_engine.grammar.checker import GrammarChecker
from headrace_engine.grammar.grammar import TokenizerDefinition
from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams
from unit.engine.fake_runner import EOS, VOCAB_SIZE
from unit.engine.letters import tokenizer_json


def definition() -> TokenizerDefinition:
    return TokenizerDefinition(tokenizer_json=tokenizer_json().encode(), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(definition)
    yield checker
    checker.close()


def chain(links: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(links)) + f'\nr{links}: "a"'


def reference_chain(links: int) -> dict[str, Any]:
    defs: dict[str, Any] = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(links)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{links}": {"type": "null"}}}


HOSTILE = {
    "a multiple of a large prime": {"json": {"type": "integer", "multipleOf": 999983}},
    "overlapping property patterns": {
        "json": {"type": "object", "patternProperties": {f"^[a-z]*{i}[a-z]*$": {} for i in range(400)}}
    },
    "optional letters": {"regex": "a?" * 10_000 + "a" * 10_000},
    "a long chain of rules": {"grammar": chain(4000)},
    "a long chain of references": {"json": reference_chain(1000)},
}


@pytest.mark.parametrize("values", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_grammar_is_refused_and_the_next_good_one_is_not(
    checker: GrammarChecker, values: dict[str, Any]
) -> None:
    hostile = StructuredOutputsParams(**values)
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidRequestError, match=r"the grammar takes more than .* to compile"):
            checker.check(hostile)
    checker.check(StructuredOutputsParams(regex="fine"))


@pytest.mark.parametrize("regex", ["((a{1,1000}){1,1000}){1,1000}", "((a{1,100}){1,100}){1,100}"])
def test_a_grammar_that_compiles_and_explodes_after_some_tokens_is_refused(checker: GrammarChecker, regex: str) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs: the grammar is too complex"):
        checker.check(StructuredOutputsParams(regex=regex))


@pytest.mark.parametrize(
    "regex",
    [
        r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}",
        r"(\w+ ){10,100}\.",
        r"([^\n]{1,80}\n){1,50}",
        r"(([A-Z][^.!?]{5,200}[.!?]) ){2,10}",
        r"(?:[a-z]{1,20} ){0,100}[a-z]{1,20}",
        r".{1,10000}",
    ],
)
def test_an_ordinary_regex_with_counts_passes(checker: GrammarChecker, regex: str) -> None:
    checker.check(StructuredOutputsParams(regex=regex))


def test_what_is_wrong_with_a_grammar_reaches_the_caller(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidRequestError, match=r"structured_outputs: .*unclosed group"):
        checker.check(StructuredOutputsParams(regex="(a"))


def test_a_large_but_honest_schema_passes(checker: GrammarChecker) -> None:
    properties = {
        f"field_{i}": {"type": "array", "items": {"type": "string", "maxLength": 100}, "description": "x" * 20}
        for i in range(200)
    }
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    assert len(json.dumps(schema)) > 20_000
    checker.check(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_somebody_else_ends_says_nothing_about_the_grammar(
    checker: GrammarChecker, by: signal.Signals
) -> None:
    checker.check(StructuredOutputsParams(regex="first"))
    process = checker._process
    assert process is not None
    os.kill(process.pid, by)
    # Not waited for: it is found dead, its exit status unread, as an end in the middle of a trial leaves it.
    checker.check(StructuredOutputsParams(regex=f"second {by}"))


def test_a_known_verdict_does_not_wait_for_the_trial_of_another_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = StructuredOutputsParams(regex="known")
    checker.check(known)
    begun, release = threading.Event(), threading.Event()

    def long_trial(self: GrammarChecker, source: str) -> None:
        begun.set()
        assert release.wait(120)

    monkeypatch.setattr(GrammarChecker, "_try", long_trial)
    other = threading.Thread(target=checker.check, args=[StructuredOutputsParams(regex="other")])
    other.start()
    assert begun.wait(60)
    again = threading.Thread(target=checker.check, args=[known])
    again.start()
    again.join(60)
    waited = again.is_alive()
    release.set()
    other.join()
    again.join()
    assert not waited


def test_a_tokenizer_that_cannot_be_used_refuses_every_grammar() -> None:
    checker = GrammarChecker(lambda: TokenizerDefinition(tokenizer_json=b"{}", vocab_size=3, eos_token_ids=[0]))
    try:
        with pytest.raises(InvalidRequestError, match="tokenizer cannot be used with grammars"):
            checker.check(StructuredOutputsParams(regex="a"))
    finally:
        checker.close()


def test_the_process_ends_with_its_owner() -> None:
    checker = GrammarChecker(definition)
    checker.check(StructuredOutputsParams(regex="a"))
    process = checker._process
    assert process is not None
    del checker
    assert process.poll() == -signal.SIGKILL
