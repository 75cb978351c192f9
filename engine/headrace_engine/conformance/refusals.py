"""Requests that an engine does not support are refused before they are sent, or end with an error.

`CapabilityChecks` refuses a request that needs more than the engine claims. For all others, the engine itself returns
an error and continues to serve.
"""

from collections.abc import Callable
from typing import Any

from headrace_engine.conformance.case import DoesNotApply, case, case_for_each, expect
from headrace_engine.conformance.driver import EngineUnderTest
from headrace_engine.options.capabilities import CapabilityChecks
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.request import EngineCoreRequest

_FEATURES: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 1},
    "logprob_token_ids": {"logprob_token_ids": [1, 2]},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}},
    "min_tokens": {"min_tokens": 3},
}
_FORMS: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": "[ab]+",
    "choice": ["a", "b"],
    "grammar": 'start: "a"',
    "json_object": True,
}


def _tokens(engine: EngineUnderTest, count: int) -> list[int]:
    if count > engine.info.vocab_size:
        raise DoesNotApply(f"the vocabulary has {engine.info.vocab_size} tokens, fewer than the limit")
    return list(dict.fromkeys([*engine.end_tokens, *range(engine.info.vocab_size)]))[:count]


_LIMITS: dict[str, Callable[[EngineUnderTest, int], EngineCoreRequest]] = {
    "max_allowed_token_ids": lambda e, count: e.request(allowed_token_ids=_tokens(e, count)),
    "max_logit_bias": lambda e, count: e.request(logit_bias=dict.fromkeys(_tokens(e, count), 1.0)),
    "max_stop_token_ids": lambda e, count: e.request(stop_token_ids=_tokens(e, count), min_tokens=2),
    "max_bad_words": lambda e, count: e.request(bad_words=[[1, token] for token in _tokens(e, count)]),
    "max_bad_words_tokens": lambda e, count: e.request(bad_words=[e.prompt(count)]),
}
"""Name of a limit -> function that makes a request with a count of the limited entries."""


@case()
def a_prompt_without_tokens_is_an_error(engine: EngineUnderTest) -> None:
    """An empty prompt ends its request with an error."""
    _expect_error(engine, engine.request([]))


@case()
def a_prompt_that_is_too_long_is_an_error(engine: EngineUnderTest) -> None:
    """A prompt that leaves no room for a token within max_model_len ends its request with an error."""
    _expect_error(engine, engine.request(engine.prompt(engine.info.max_model_len)))
    _expect_error(engine, engine.request(engine.prompt(2 * engine.info.max_model_len)))


@case()
def an_adapter_is_an_error_where_none_are_served(engine: EngineUnderTest) -> None:
    """Without enable_lora a request with an adapter ends with an error."""
    request = engine.request()
    request.lora_request = LoRARequest("nobody", lora_path="/nonexistent")
    _expect_error(engine, request)


@case_for_each(tuple(_FEATURES), lambda _: ())
def an_unclaimed_parameter_is_refused(engine: EngineUnderTest, name: str) -> None:
    """{}: a request for it is refused if the engine does not claim it."""
    if getattr(engine.capabilities, name):
        raise DoesNotApply(f"{name} is claimed")
    _expect_refused(engine, engine.request(**_FEATURES[name]))


@case()
def unclaimed_bad_words_are_refused(engine: EngineUnderTest) -> None:
    """bad_words are refused if the engine does not claim them."""
    if engine.capabilities.bad_words:
        raise DoesNotApply("bad_words is claimed")
    request = engine.request(bad_words=[engine.prompt(2)])
    request.sampling_params.bad_words = ["two tokens"]  # `CapabilityChecks` reads this field
    _expect_refused(engine, request)


@case_for_each(tuple(_FORMS), lambda _: ())
def an_unclaimed_form_is_refused(engine: EngineUnderTest, kind: str) -> None:
    """structured_outputs {}: a request for it is refused if the engine does not claim it."""
    if kind in engine.capabilities.structured_outputs:
        raise DoesNotApply(f"{kind} is claimed")
    _expect_refused(engine, engine.request(ignore_eos=False, structured_outputs={kind: _FORMS[kind]}))


@case_for_each(tuple(_LIMITS), lambda _: ())
def more_than_the_limit_is_refused(engine: EngineUnderTest, name: str) -> None:
    """{}: a request at the claimed limit is served. A request above it is refused."""
    most = getattr(engine.capabilities, name)
    if most is None:
        raise DoesNotApply(f"{name} is None: no limit")
    _expect_refused(engine, _LIMITS[name](engine, most + 1))
    if most > 0:
        answer = engine.run_one(_LIMITS[name](engine, most))
        expect(answer.error is None, f"{name}={most} is claimed, but ended with an error: {answer.error}")


@case()
def a_temperature_out_of_range_is_refused(engine: EngineUnderTest) -> None:
    """A temperature above temperature_range is refused. Its bounds are served."""
    bounds = engine.capabilities.temperature_range
    if bounds is None:
        raise DoesNotApply("temperature_range is None: no limit")
    _expect_refused(engine, engine.request(temperature=bounds[1] * 1.5))
    answers = engine.run(*[engine.request(temperature=bound) for bound in bounds])
    expect(all(answer.error is None for answer in answers), f"a bound of temperature_range {bounds} is refused")


def _expect_refused(engine: EngineUnderTest, request: EngineCoreRequest) -> None:
    """Expect a refusal before the request is sent, or an error of the engine."""
    checks = CapabilityChecks(engine.config.engine, engine.capabilities, engine.end_tokens)
    if not checks.problems(request.sampling_params, request.bad_words_token_ids):
        _expect_error(engine, request)


def _expect_error(engine: EngineUnderTest, request: EngineCoreRequest) -> None:
    """Expect an error for the request, and complete outputs of requests beside and after it."""
    mate = engine.send(engine.request(max_tokens=6))
    answer = engine.run_one(request)
    expect(answer.end[0] == "error", f"the request is served: it ended with {answer.end}")
    expect(bool(answer.error), "the error has no message")
    engine.finish(mate)
    expect(len(mate.tokens) == 6, "the request beside it is not complete")
    engine.fence()
