"""Requests with a grammar in the core: masks, ends, preemption, resume, drafts, and what else may happen to them.

The fake runner's next token is a hash of everything before it, among the tokens that the mask allows.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from headrace_engine.core import tokenizer_source
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.scheduler import Scheduler
from headrace_engine.errors import is_caused_by_request
from headrace_engine.grammar import grammar as grammar_module
from headrace_engine.grammar.grammar import GrammarCompiler, TokenizerDefinition
from headrace_engine.options.speculative_config import SpeculativeConfig
from headrace_engine.requests.request import EngineCoreRequest, FinishReason
from headrace_engine.runner.contracts import RunnerCapabilities
from unit.engine import letters
from unit.engine.fake_runner import EOS, FakeRunner, fake_config
from unit.engine.letters import decode, encode
from unit.engine.requests import Results, core_request

LIST = {"json": {"type": "array", "items": {"enum": ["a", "bc", 7]}, "minItems": 3, "maxItems": 5}}


def structured(request_id: str = "a", *, form: dict[str, Any] | None = None, **options: Any) -> EngineCoreRequest:
    options = {"max_tokens": None, **options}
    return core_request(request_id, structured_outputs=form or LIST, **options)


def core_of(runner: FakeRunner | None = None, **config: Any) -> EngineCore:
    return EngineCore(fake_config(**config), runner or FakeRunner(max_model_len=200, block_size=4))


def outputs(requests: list[EngineCoreRequest], runner: FakeRunner | None = None, **config: Any) -> Results:
    core = core_of(runner, **{"num_blocks": 200, **config})
    for request in requests:
        core.add_request(request)
    return Results().drain(core)


def test_the_output_has_the_form_and_ends_with_the_end_token() -> None:
    results = outputs([structured(str(number), seed=number) for number in range(8)])
    assert set(results.finished.values()) == {FinishReason.STOP}
    for tokens in results.tokens.values():
        assert tokens[-1] == EOS
        assert 3 <= len(json.loads(decode(tokens))) <= 5
    assert len({tuple(tokens) for tokens in results.tokens.values()}) > 4


def test_requests_without_a_grammar_are_neither_masked_nor_changed_by_those_with_one() -> None:
    plain = [core_request(f"p{number}", seed=number) for number in range(3)]
    alone = outputs(plain)
    mixed = outputs([*plain, *(structured(str(number)) for number in range(3))])
    assert {name: mixed.tokens[name] for name in alone.tokens} == alone.tokens


def test_a_batch_without_grammars_carries_no_masks() -> None:
    runner = FakeRunner()
    outputs([core_request("a"), core_request("b", seed=1)], runner, num_blocks=64)
    assert all(batch.grammar_bitmask is None for batch in runner.batches)


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 3},
        {"num_blocks": 51, "max_num_seqs": 6},
        {"prefix_caching": False, "max_num_seqs": 1},
        {"policy": "priority", "num_blocks": 51},
    ],
    ids=str,
)
def test_neither_chunks_nor_preemptions_nor_batch_mates_change_the_output(config: dict[str, Any]) -> None:
    prompt = [1, 2, 3] * 9
    long_list = {"json": {"type": "array", "items": {"enum": ["abcabc"]}, "minItems": 6, "maxItems": 9}}
    requests = [structured(str(number), seed=number, prompt=prompt, form=long_list) for number in range(6)]
    results = outputs(requests, **config)
    assert results.tokens == outputs(requests).tokens
    assert set(results.finished.values()) == {FinishReason.STOP}
    if config.get("num_blocks") == 51:
        assert results.preemptions > 0


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_do_not_change_the_output(method: str) -> None:
    letters = {"regex": "(abcabc|abcd){8,12}"}
    requests = [structured(str(number), seed=number, form=letters) for number in range(4)]
    speculative = SpeculativeConfig(
        method=method,  # type: ignore[arg-type]
        num_speculative_tokens=4,
        prompt_lookup_min=1,
        prompt_lookup_max=2,
    )
    runner = FakeRunner(
        max_model_len=200,
        caps=RunnerCapabilities(verifies_drafts=True),
        num_drafts=4 if method == "draft_model" else 0,
    )
    results = outputs(requests, runner, speculative=speculative)
    assert results.tokens == outputs(requests).tokens
    assert any(batch.draft_token_ids for batch in runner.batches)


def test_a_draft_that_leads_to_a_dead_end_of_the_grammar_harms_nobody_who_does_not_go_there() -> None:
    dead_end = {"grammar": 'start: "ab"{10} | "ac" NEVER\nNEVER: /x.*/ & /y.*/'}
    message = structured("a", form=dead_end, prompt=encode("ac"))
    seeds = (seed for seed in range(50) if outputs([replace(message, seed=seed)]).errors == {})
    message.seed = next(seeds)
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1, prompt_lookup_max=1)
    runner = FakeRunner(max_model_len=200, caps=RunnerCapabilities(verifies_drafts=True))
    results = outputs([message], runner, speculative=speculative)
    assert encode("c")[0] in {token for batch in runner.batches for token in batch.draft_token_ids.get("a", ())}
    assert results.errors == {}
    assert results.tokens == outputs([message]).tokens


def test_another_attempt_goes_on_where_the_first_one_stopped() -> None:
    whole = outputs([structured()]).tokens["a"]
    for cut in range(1, len(whole)):
        assert outputs([structured(output=whole[:cut])]).tokens["a"] == whole[cut:]


def test_an_attempt_that_had_ended_is_not_begun_again() -> None:
    whole = outputs([structured()]).tokens["a"]
    again = outputs([structured(output=whole)])
    assert (again.tokens["a"], again.finished["a"]) == ([], FinishReason.STOP)


def test_output_of_an_earlier_attempt_that_does_not_fit_the_grammar_is_an_error() -> None:
    results = outputs([structured(output=encode("[!")), structured("b")])
    assert results.finished == {"a": FinishReason.ERROR, "b": FinishReason.STOP}
    assert "doesn't satisfy the grammar" in results.errors["a"]


def test_a_cut_output_is_as_long_as_allowed() -> None:
    results = outputs([structured(max_tokens=5)])
    assert results.finished["a"] is FinishReason.LENGTH
    assert len(results.tokens["a"]) == 5


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 40}, {"ignore_eos": True, "min_tokens": 40}])
def test_a_complete_text_ends_whatever_the_request_wants(options: dict[str, Any]) -> None:
    results = outputs([structured(form={"regex": "ab"}, **options)])
    assert results.tokens["a"] == [*encode("ab"), EOS]
    assert results.finished["a"] is FinishReason.STOP


def test_min_tokens_forbids_the_end_while_the_text_can_go_on() -> None:
    form = {"regex": "a{1,30}"}
    lengths = {len(outputs([structured(form=form, seed=seed)]).tokens["a"]) for seed in range(5)}
    assert min(lengths) < 12
    for seed in range(5):
        assert len(outputs([structured(form=form, seed=seed, min_tokens=20)]).tokens["a"]) > 20


def test_a_stop_token_ends_the_text_early() -> None:
    results = outputs([structured(form={"regex": "a{9}b{9}"}, stop_token_ids=encode("b"))])
    assert decode(results.tokens["a"]) == "a" * 9 + "b"
    assert results.stop_reasons["a"] == encode("b")[0]


@pytest.mark.parametrize("asked_before", [True, False], ids=["a client has the tokenizer", "nobody has it"])
def test_the_first_grammar_reads_the_vocabulary_and_no_other_request_does(
    asked_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    definitions, loads, create = [], [], GrammarCompiler.__init__

    def note(self: GrammarCompiler, definition: TokenizerDefinition) -> None:
        definitions.append(definition.tokenizer_json)
        create(self, definition)

    def load(config: Any) -> Any:
        loads.append(config)
        return letters.load_tokenizer(config)

    monkeypatch.setattr(GrammarCompiler, "__init__", note)
    monkeypatch.setattr(tokenizer_source, "load_tokenizer", load)
    core = core_of(num_blocks=200)
    if asked_before:
        assert core.call("tokenizer").result()["tokenizer_json"] == letters.tokenizer_json().encode()
    core.add_request(core_request("plain"))
    results = Results().drain(core)
    assert definitions == []
    for name in ("first", "second"):
        core.add_request(structured(name))
        results.drain(core)
    assert definitions == [letters.tokenizer_json().encode()]
    assert len(loads) == 1
    assert results.finished["second"] is FinishReason.STOP


def test_a_grammar_that_cannot_be_compiled_ends_its_request_only() -> None:
    results = outputs([structured("bad", form={"regex": "(a"}), structured("good"), core_request("plain")])
    assert results.finished["bad"] is FinishReason.ERROR
    assert "unclosed group" in results.errors["bad"]
    assert results.finished["good"] is FinishReason.STOP
    assert results.tokens["bad"] == []


def test_a_compiler_that_fails_unexpectedly_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_it = GrammarCompiler.compile

    def fail_once(self: GrammarCompiler, *args: Any, **named: Any) -> Any:
        monkeypatch.setattr(GrammarCompiler, "compile", compile_it)
        raise RuntimeError("a word of the grammar")

    monkeypatch.setattr(GrammarCompiler, "compile", fail_once)
    results = outputs([structured("a"), structured("b")])
    assert results.errors == {"a": "the grammar of structured_outputs could not be compiled: RuntimeError"}
    assert results.finished["b"] is FinishReason.STOP


def test_an_engine_that_cannot_create_its_compiler_does_not_blame_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(GrammarCompiler, "__init__", fail)
    results = outputs([structured("a"), core_request("plain")])
    assert results.errors == {"a": "the compiler of grammars could not be created: OSError: no space left"}
    assert not is_caused_by_request(results.errors["a"])


def test_a_grammar_that_is_too_complex_where_the_output_is_ends_its_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_LEXER_STATES", 60)
    monkeypatch.setattr(grammar_module, "_MIN_TOKENS_PER_AUTOMATON", 100)
    hungry = structured("hungry", form={"regex": "[ab]*a[ab]{12}b[ab]{40}"})
    results = outputs([hungry, structured("good", form={"regex": "ab"}), core_request("plain")])
    assert results.finished["hungry"] is FinishReason.ERROR
    assert results.errors["hungry"].startswith("structured_outputs: the grammar is too complex")
    assert results.finished["good"] is FinishReason.STOP
    assert "plain" in results.finished
    assert set(decode(results.tokens["hungry"])) <= set("ab"), "tokens drawn without a mask came out"


LONG_TEXT = {"json": {"type": "string", "minLength": 150, "maxLength": 160}}
FEW_STATES = 120
GRAMMARS = ("engine/headrace_engine/grammar", "engine/headrace_engine/core/grammars.py")


@pytest.mark.rotated(*GRAMMARS)
def test_an_output_that_fills_its_automaton_goes_on_to_its_full_length() -> None:
    form = {"json": {"type": "string", "minLength": 9000, "maxLength": 9000}}
    runner = FakeRunner(max_model_len=9100, block_size=64)
    core = core_of(runner, num_blocks=200, max_num_batched_tokens=1000)
    core.add_request(structured(form=form))
    results = Results().drain(core, most_steps=10_000)
    assert results.errors == {}
    assert results.finished["a"] is FinishReason.STOP
    assert len(json.loads(decode(results.tokens["a"]))) == 9000


@pytest.mark.parametrize(
    "config",
    [{}, {"prefix_caching": False}, {"policy": "priority"}, {"num_blocks": 90}, {"max_num_batched_tokens": 3}],
    ids=str,
)
def test_another_automaton_changes_no_output_and_no_batch_mate(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        *(structured(str(number), seed=number, form=LONG_TEXT) for number in range(4)),
        structured("list", seed=9),
        core_request("plain", max_tokens=150, ignore_eos=True),
    ]
    undisturbed = outputs(requests)
    assert set(undisturbed.finished.values()) == {FinishReason.STOP, FinishReason.LENGTH}
    monkeypatch.setattr(grammar_module, "_MAX_LEXER_STATES", FEW_STATES)
    renewed = count_renewals(monkeypatch)
    results = outputs(requests, **config)
    assert results.tokens == undisturbed.tokens
    assert len(renewed) >= 4


def count_renewals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of requests whose grammars fail from here on."""
    renewed: list[str] = []
    release = Scheduler._release_for_grammar

    def note(self: Scheduler, request: Any, grammar: Any) -> None:
        renewed.append(request.request_id)
        release(self, request, grammar)

    monkeypatch.setattr(Scheduler, "_release_for_grammar", note)
    return renewed


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_an_automaton_that_is_full_behind_a_draft_changes_no_output(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"regex": "(abcabc|abcd){24,28}"}
    requests = [structured(str(number), seed=number, form=form) for number in range(3)]
    undisturbed = outputs(requests)
    monkeypatch.setattr(grammar_module, "_MAX_LEXER_STATES", FEW_STATES)
    renewed = count_renewals(monkeypatch)
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=2)
    runner = FakeRunner(
        max_model_len=200,
        block_size=4,
        caps=RunnerCapabilities(verifies_drafts=True),
        num_drafts=4 if method == "draft_model" else 0,
    )
    assert outputs(requests, runner, speculative=speculative).tokens == undisturbed.tokens
    assert renewed


def test_a_request_that_waits_for_another_automaton_can_be_aborted_and_is_no_new_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_LEXER_STATES", FEW_STATES)
    renewed = count_renewals(monkeypatch)
    core = core_of(num_blocks=200, max_num_queued_requests=1)
    core.add_request(structured("a", form=LONG_TEXT))
    results = Results()
    while not renewed:
        results.step(core)
    core.add_request(structured("b"))  # "a" does not count among those that wait
    core.abort_requests(["a"])
    results.drain(core)
    assert results.finished == {"b": FinishReason.STOP}
    assert core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_usable


@pytest.mark.rotated(*GRAMMARS)
def test_an_attempt_resumes_behind_more_output_than_one_automaton_holds() -> None:
    form = {"json": {"type": "string", "minLength": 30_000, "maxLength": 30_000}}
    output = encode('"' + "ab01" * 7400)
    runner = FakeRunner(max_model_len=30_100, block_size=1024)
    results = outputs([structured(form=form, output=output)], runner, max_num_batched_tokens=31_000)
    assert results.errors == {}
    assert len(json.loads(decode([*output, *results.tokens["a"]]))) == 30_000


def test_others_go_on_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    compile_it = GrammarCompiler.compile

    def slow_compile(self: GrammarCompiler, *args: Any, **named: Any) -> Any:
        assert release.wait(60)
        return compile_it(self, *args, **named)

    monkeypatch.setattr(GrammarCompiler, "compile", slow_compile)
    core = core_of(num_blocks=200)
    core.add_request(structured("slow"))
    core.add_request(structured("gone"))
    core.add_request(core_request("plain", max_tokens=20, ignore_eos=True))
    results = Results()
    while "plain" not in results.finished:
        results.step(core)
    core.abort_requests(["gone"])
    assert core.has_work()
    assert "slow" not in results.tokens
    release.set()
    results.drain(core)
    assert results.finished["slow"] is FinishReason.STOP
    assert "gone" not in results.tokens


def test_a_request_that_waits_for_its_grammar_counts_among_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    core = core_of(num_blocks=200, max_num_queued_requests=2)
    prepare = core._grammars._prepare
    monkeypatch.setattr(core._grammars, "_prepare", lambda *args: release.wait(60) and prepare(*args))
    for name in "abc":
        core.add_request(structured(name))
    results = Results()
    results.step(core)
    assert results.errors == {"c": "the queue is full: 2 requests wait, and max_num_queued_requests is 2"}
    core.abort_requests(["a"])
    core.add_request(structured("d"))
    release.set()
    results.drain(core)
    assert {name for name, reason in results.finished.items() if reason is FinishReason.STOP} == {"b", "d"}
    core.add_request(structured("bad", form={"regex": "(a"}))
    results.drain(core)
    core.add_request(structured("e"))
    core.add_request(structured("f"))
    assert results.drain(core).finished["f"] is FinishReason.STOP


def test_nothing_is_left_of_a_request_that_ended_or_was_aborted() -> None:
    core = core_of(num_blocks=200)
    for number in range(4):
        core.add_request(structured(str(number), seed=number))
    results = Results()
    while not results.tokens:
        results.step(core)
    core.abort_requests(["0"])
    results.drain(core)
    assert len(core.scheduler.grammars) == 0
    assert not core.has_work()
    core.check_integrity()
