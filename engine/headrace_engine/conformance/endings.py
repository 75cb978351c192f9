"""When an output ends, and with which reason."""

from headrace_engine.conformance.case import Broken, DoesNotApply, case, expect, feature, limit
from headrace_engine.conformance.driver import Answer, EngineUnderTest
from headrace_engine.requests.request import EngineCoreRequest

BIAS = limit("max_logit_bias")
STOPS = limit("max_stop_token_ids")


@case()
def max_tokens_ends_with_length(engine: EngineUnderTest) -> None:
    """max_tokens=7 gives 7 tokens and finish_reason length. max_tokens=1 gives one token."""
    for most in (7, 1):
        answer = engine.run_one(engine.request(max_tokens=most))
        _expect_end(answer, ("length", None), most)


@case()
def max_model_len_ends_with_length(engine: EngineUnderTest) -> None:
    """Without max_tokens an output ends with length when prompt and output have max_model_len tokens."""
    for left in (9, 1):
        prompt = engine.prompt(engine.info.max_model_len - left)
        _expect_end(engine.run_one(engine.request(prompt, max_tokens=None)), ("length", None), left)


@case(STOPS)
def a_stop_token_ends_with_its_id(engine: EngineUnderTest) -> None:
    """The first generated token of stop_token_ids ends the output. It is its last token and stop_reason."""
    whole = engine.run_one(engine.request())
    place, token = last_new_token(whole)
    absent = next(t for t in range(engine.info.vocab_size) if t not in whole.tokens)
    answer = engine.run_one(engine.request(stop_token_ids=[absent, token]))
    _expect_end(answer, ("stop", token), place + 1)
    expect(answer.tokens == whole.tokens[: place + 1], "the tokens before the stop token are others than without it")


@case(BIAS)
def an_end_token_ends_without_a_stop_reason(engine: EngineUnderTest) -> None:
    """Each end token of the model and its tokenizer ends the output with stop; stop_reason is None."""
    for end in own_end_tokens(engine):
        answer = engine.run_one(engine.request(ignore_eos=False, logit_bias={end: 100.0}))
        _expect_end(answer, ("stop", None), 1)


@case(BIAS)
def ignore_eos_goes_on(engine: EngineUnderTest) -> None:
    """With ignore_eos, an end token does not end the output."""
    end = own_end_tokens(engine)[0]
    answer = engine.run_one(engine.request(logit_bias={end: 100.0}, max_tokens=6))
    _expect_end(answer, ("length", None), 6)
    expect(answer.tokens == [end] * 6, "logit_bias of 100 does not make the end token the only one")


@case(BIAS, STOPS)
def an_end_token_that_was_asked_for_is_the_stop_reason(engine: EngineUnderTest) -> None:
    """With ignore_eos, an end token among stop_token_ids ends the output and is its stop_reason."""
    end = own_end_tokens(engine)[0]
    answer = engine.run_one(engine.request(logit_bias={end: 100.0}, stop_token_ids=[end]))
    _expect_end(answer, ("stop", end), 1)


@case(feature("min_tokens"), BIAS)
def min_tokens_holds_the_end_token_back(engine: EngineUnderTest) -> None:
    """The first min_tokens tokens have no end token, however likely it is. The next token may be one."""
    end = own_end_tokens(engine)[0]
    answer = engine.run_one(engine.request(ignore_eos=False, logit_bias={end: 100.0}, min_tokens=5))
    _expect_end(answer, ("stop", None), 6)
    expect(not set(answer.tokens[:5]) & set(engine.end_tokens), "an end token was drawn before min_tokens")


@case(feature("min_tokens"), STOPS)
def min_tokens_holds_a_stop_token_back(engine: EngineUnderTest) -> None:
    """The first min_tokens tokens have no stop token."""
    whole = engine.run_one(engine.request())
    first = whole.tokens[0]
    answer = engine.run_one(engine.request(stop_token_ids=[first], min_tokens=8))
    expect(first not in answer.tokens[:8], "a stop token was drawn before min_tokens")
    expect(len(answer.tokens) > 8 or answer.finish is None, f"the output has {len(answer.tokens)} tokens, min_tokens 8")


@case(feature("repetition_detection"), BIAS)
def a_loop_ends_with_repetition(engine: EngineUnderTest) -> None:
    """repetition_detection ends an output with repetition once its last min_count patterns are equal."""
    request = looping(engine)
    answer = engine.run_one(request)
    _expect_end(answer, ("repetition", "repetition_detected"), 4)


def looping(engine: EngineUnderTest) -> EngineCoreRequest:
    """Return a request that repeats one token and is stopped at the fourth."""
    token = engine.prompt(1)[0]
    detection = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 4}
    return engine.request(logit_bias={token: 100.0}, repetition_detection=detection)


def last_new_token(answer: Answer) -> tuple[int, int]:
    """Return the last position, except 0, with a token that does not occur earlier. Return the token too."""
    tokens = answer.tokens
    places = [place for place in range(1, len(tokens) - 1) if tokens[place] not in tokens[:place]]
    if not places:
        raise DoesNotApply("the model repeats one token, so that nothing can be stopped at")
    return places[-1], tokens[places[-1]]


def own_end_tokens(engine: EngineUnderTest) -> list[int]:
    if not engine.end_tokens:
        raise DoesNotApply("the model has no end token")
    return engine.end_tokens


def _expect_end(answer: Answer, end: tuple[str, int | str | None], length: int) -> None:
    if answer.error is not None:
        raise Broken(f"the request ended with an error: {answer.error}")
    expect(answer.end == end, f"finish_reason and stop_reason are {answer.end}, expected {end}")
    expect(len(answer.tokens) == length, f"the output has {len(answer.tokens)} tokens, expected {length}")
