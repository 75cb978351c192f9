"""Requests that must resume exactly: one for each sampling parameter that depends on earlier tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace_engine.conformance.case import (
    DRAWS,
    GREEDY_RESUME,
    SAMPLED_RESUME,
    NeededCapability,
    feature,
    limit,
    structured,
)
from headrace_engine.conformance.driver import EngineUnderTest
from headrace_engine.conformance.endings import last_new_token, own_end_tokens
from headrace_engine.conformance.structure import FORMS, form_request
from headrace_engine.requests.request import EngineCoreRequest

SEED = 77


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of request.

    Args:
        cuts: numbers of tokens after which the request is resumed, besides the usual ones.
    """

    name: str
    make: Callable[[EngineUnderTest], EngineCoreRequest]
    sampled: bool = False
    claims: tuple[NeededCapability, ...] = ()
    cuts: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def needs(self) -> list[NeededCapability]:
        exact = [DRAWS, SAMPLED_RESUME] if self.sampled else [GREEDY_RESUME]
        return [*exact, *self.claims]


def _plain(**params: Any) -> Callable[[EngineUnderTest], EngineCoreRequest]:
    return lambda engine: engine.request(engine.prompt(40, 1), seed=SEED, **params)


def _bad_words(engine: EngineUnderTest) -> EngineCoreRequest:
    tokens = engine.run_one(engine.request(engine.prompt(40, 1))).tokens
    return engine.request(engine.prompt(40, 1), bad_words=[tokens[9:12], tokens[3:5]], seed=SEED)


def _stop_token(engine: EngineUnderTest) -> EngineCoreRequest:
    _, token = last_new_token(engine.run_one(engine.request(engine.prompt(40, 1))))
    return engine.request(engine.prompt(40, 1), stop_token_ids=[token], max_tokens=60)


def _end_token(engine: EngineUnderTest) -> EngineCoreRequest:
    return engine.request(ignore_eos=False, min_tokens=20, logit_bias={own_end_tokens(engine)[0]: 100.0})


def _max_model_len(engine: EngineUnderTest) -> EngineCoreRequest:
    return engine.request(engine.prompt(engine.info.max_model_len - 20), max_tokens=None)


def _repetition(engine: EngineUnderTest) -> EngineCoreRequest:
    token = engine.prompt(1)[0]
    detection = {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 9}
    return engine.request(logit_bias={token: 100.0}, repetition_detection=detection)


def _allowed(engine: EngineUnderTest) -> EngineCoreRequest:
    allowed = [token for token in range(engine.info.vocab_size) if token not in engine.end_tokens][3:43]
    return engine.request(allowed_token_ids=allowed, temperature=1.0, presence_penalty=0.5, seed=SEED)


def _bias(engine: EngineUnderTest) -> EngineCoreRequest:
    first, second = engine.prompt(2)
    return engine.request(logit_bias={first: 3.0, second: -3.0}, frequency_penalty=0.4)


def _form(form_index: int, **params: float) -> Callable[[EngineUnderTest], EngineCoreRequest]:
    return lambda engine: form_request(engine, FORMS[form_index], seed=SEED, **params)


VARIANTS = (
    Variant("greedy", _plain()),
    Variant("sampled", _plain(temperature=1.0), sampled=True),
    Variant("sampled, top_p and top_k", _plain(temperature=0.8, top_p=0.9, top_k=40), sampled=True),
    Variant("sampled, min_p", _plain(temperature=1.2, min_p=0.05), sampled=True),
    Variant("repetition_penalty", _plain(repetition_penalty=1.4)),
    Variant("presence_penalty", _plain(presence_penalty=1.8, max_tokens=40)),
    Variant("frequency_penalty", _plain(frequency_penalty=1.1, max_tokens=40)),
    Variant(
        "sampled, penalties",
        _plain(temperature=1.0, presence_penalty=0.8, frequency_penalty=0.8, repetition_penalty=1.1),
        sampled=True,
    ),
    Variant("stop_token_ids", _stop_token, claims=(limit("max_stop_token_ids"),)),
    Variant("min_tokens and the end token", _end_token, claims=(feature("min_tokens"), limit("max_logit_bias"))),
    Variant("max_model_len", _max_model_len),
    Variant("bad_words", _bad_words, claims=(feature("bad_words"), limit("max_bad_words", 2)), cuts=(4, 10, 11)),
    Variant("sampled, allowed_token_ids", _allowed, sampled=True, claims=(limit("max_allowed_token_ids", 40),)),
    Variant("logit_bias", _bias, claims=(limit("max_logit_bias", 2),)),
    Variant(
        "repetition_detection",
        _repetition,
        claims=(feature("repetition_detection"), limit("max_logit_bias")),
        cuts=(5,),
    ),
    Variant("logprobs", _plain(logprobs=3, presence_penalty=0.5)),
    Variant("prompt_logprobs", _plain(logprobs=1, prompt_logprobs=2), claims=(feature("prompt_logprobs"),)),
    *(
        Variant(f"structured_outputs {form.kind}", _form(index), claims=(structured(form.kind),))
        for index, form in enumerate(FORMS)
    ),
    *(
        Variant(
            f"sampled, structured_outputs {form.kind}",
            _form(index, temperature=1.0),
            sampled=True,
            claims=(structured(form.kind),),
        )
        for index, form in enumerate(FORMS[:2])
    ),
)
