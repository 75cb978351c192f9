"""What requests ask of the engine, and what it refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import Tokenizer

from headrace_engine.errors import LoRAError
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.request import FinishReason
from headrace_engine.requests.sampling_params import SamplingParams
from vllm_engine.driven_engine import Case, DrivenEngine

PROMPT = [504, 3575, 282, 4649, 314]


def greedy(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **given})


def test_an_aborted_request_gets_no_more_tokens_and_leaves_nothing(engine: DrivenEngine) -> None:
    gone = engine.add(Case(PROMPT, greedy(max_tokens=900)))
    engine.process.get_outputs()
    engine.process.abort_requests([gone, "unknown"])
    (answer,) = engine.run([Case(PROMPT, greedy())])
    assert answer.finish_reason is FinishReason.LENGTH
    assert engine.stats[-1].running == 0
    assert engine.call("reset_prefix_cache") is True


def test_a_prompt_that_is_too_long_is_refused_with_a_sentence(engine: DrivenEngine) -> None:
    (answer,) = engine.run([Case([5] * 1024, greedy())])
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.error is not None and "1024" in answer.error


@pytest.mark.parametrize(
    "structured", [{"regex": "(?=x)y"}, {"grammar": "start: nowhere"}, {"json": '{"type": "no such type"}'}]
)
def test_a_form_that_cannot_be_compiled_is_refused_and_the_engine_lives(
    engine: DrivenEngine, structured: dict[str, Any]
) -> None:
    refused, served = engine.run(
        [Case(PROMPT, greedy(ignore_eos=False, structured_outputs=structured)), Case(PROMPT, greedy())]
    )
    assert refused.finish_reason is FinishReason.ERROR and refused.error
    assert len(served.tokens) == 8


@pytest.mark.parametrize("structured", [{"json": {"enum": ["four"]}}, {"regex": '"four"'}, {"choice": ['"four"']}])
def test_a_grammar_begins_after_the_thought_that_the_prompt_has_opened(
    engine: DrivenEngine, structured: dict[str, Any]
) -> None:
    tokenizer = Tokenizer.from_buffer(engine.call("tokenizer")["tokenizer_json"])
    prompt = tokenizer.encode("Two and two is <think>\n").ids
    thought = tokenizer.encode("Let me see.</think>\n").ids
    asked = {"structured_outputs": structured, "ignore_eos": False}
    thinking, resumed, free = engine.run(
        [
            Case(prompt, greedy(**asked)),
            Case(prompt, greedy(**asked, max_tokens=40), emitted=thought),
            Case(prompt, greedy(ignore_eos=False)),
        ]
    )
    assert thinking.tokens == free.tokens
    assert tokenizer.decode(resumed.tokens).strip() == '"four"'
    assert resumed.finish_reason is FinishReason.STOP


def test_rules_that_leave_no_token_end_the_request_alone_and_say_so(engine: DrivenEngine) -> None:
    """The grammar must end where min_tokens does not let it."""
    case = Case(PROMPT, greedy(ignore_eos=False, structured_outputs={"choice": ["a"]}, min_tokens=6, max_tokens=8))
    (answer,) = engine.run([case])
    assert answer.finish_reason in (FinishReason.ERROR, FinishReason.STOP)
    if answer.finish_reason is FinishReason.ERROR:
        assert answer.error is not None and "no token is left" in answer.error


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": list(range(100, 1300))},
        {"logit_bias": dict.fromkeys(range(100, 1300), 1.0)},
        {"stop_token_ids": list(range(100, 300)), "min_tokens": 3},
    ],
)
def test_more_than_the_engine_has_room_for_does_not_end_it(engine: DrivenEngine, given: dict[str, Any]) -> None:
    """Runner v2 would end; it tells its limits, and refuses what exceeds them."""
    (answer, _) = engine.run([Case(PROMPT, greedy(**given)), Case(PROMPT, greedy())])
    if engine.process.capabilities.max_allowed_token_ids is None:
        assert answer.error is None
    else:
        assert answer.error is not None and "takes at most" in answer.error
    many_words = Case(PROMPT, greedy(), bad_words=[[token] for token in range(100, 400)])
    assert engine.run([many_words])[0].finish_reason is not None


def test_temperatures_out_of_range_are_refused_and_tiny_ones_are_greedy(engine: DrivenEngine) -> None:
    hot, tiny, zero = engine.run([Case(PROMPT, greedy(temperature=temperature)) for temperature in (2.5, 1e-6, 0.0)])
    assert hot.error is not None and "temperature" in hot.error
    assert tiny.tokens == zero.tokens


def test_the_seed_minus_one_is_a_seed(engine: DrivenEngine) -> None:
    first, second, other = (
        engine.run([Case(PROMPT, greedy(temperature=1.0, max_tokens=16), seed=seed)])[0].tokens for seed in (-1, -1, 5)
    )
    assert first == second
    assert first != other


def test_a_form_means_what_it_means_to_headraces_own_engine(engine: DrivenEngine) -> None:
    """vLLM alone passes over whitespace_pattern and lets \\d be any script's digit."""
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_buffer(engine.call("tokenizer")["tokenizer_json"])

    def text(**structured: Any) -> str:
        (answer,) = engine.run([Case(PROMPT, greedy(max_tokens=60, structured_outputs=structured))])
        assert answer.error is None
        assert answer.end == (FinishReason.STOP, None)
        decoded: str = tokenizer.decode(answer.tokens, skip_special_tokens=True)
        return decoded

    assert re.fullmatch(r'\{"a":-?\d+(,"[^\s]+)?.*\}', text(json=schema, disable_any_whitespace=True))
    assert re.fullmatch(r"[0-9]{3}", text(regex=r"\d{3}"))
    assert text(grammar='root ::= "yes" | "no"') in ("yes", "no")
    assert text(choice=["a ::= b", "start: c"]) in ("a ::= b", "start: c")
    assert isinstance(json.loads(text(json_object=True, whitespace_pattern="[ ]?")), dict)


def test_cached_prompt_tokens_are_told_and_a_salt_keeps_them_apart(
    engine: DrivenEngine, workload: list[dict[str, Any]]
) -> None:
    prompt = next(row["prompt_token_ids"] for row in workload if row["prompt_len"] > 300)
    engine.call("reset_prefix_cache")
    first, again, salted, salted_again = (
        engine.run([Case(prompt, greedy(), options={"cache_salt": salt})])[0] for salt in ("", "", "a", "a")
    )
    assert (first.num_cached_tokens, salted.num_cached_tokens) == (0, 0)
    assert 0 < again.num_cached_tokens < len(prompt)
    assert salted_again.num_cached_tokens == again.num_cached_tokens
    assert first.tokens == again.tokens == salted.tokens


def test_an_urgent_request_is_admitted_before_those_that_wait(options: dict[str, Any]) -> None:
    engine = DrivenEngine(**options, max_num_seqs=1)
    try:
        ids = [
            engine.add(Case(PROMPT, greedy(), options={"priority": priority, "arrival_time": float(place + 1)}))
            for place, priority in enumerate((5, 5, 0))
        ]
        admitted: list[str] = []
        ended = 0
        while ended < len(ids):
            step = engine.process.get_outputs()
            assert step is not None
            admitted += step.stats.admitted_choice_ids
            ended += sum(output.finish_reason is not None for output in step.outputs)
    finally:
        engine.close()
    assert admitted.index(ids[2]) < admitted.index(ids[1])


def test_a_full_queue_refuses_with_its_limit(options: dict[str, Any]) -> None:
    engine = DrivenEngine(**options, max_num_seqs=1, max_num_queued_requests=1)
    try:
        answers = engine.run([Case(PROMPT, greedy(max_tokens=40)) for _ in range(6)])
        later = engine.run([Case(PROMPT, greedy())])
    finally:
        engine.close()
    refused = [answer for answer in answers if answer.error is not None]
    assert refused and all("max_num_queued_requests is 1" in str(answer.error) for answer in refused)
    assert any(answer.error is None for answer in answers)
    assert later[0].error is None


def test_adapters_are_refused_where_lora_is_off(engine: DrivenEngine) -> None:
    adapter = LoRARequest("alpha", lora_path="/nowhere")
    (answer,) = engine.run([Case(PROMPT, greedy(), options={"lora_request": adapter})])
    assert answer.error is not None and "enable_lora is not set" in answer.error
    with pytest.raises(LoRAError, match="enable_lora is not set"):
        engine.call("list_loras")
