"""A request that continues after the tokens of an earlier attempt equals the uninterrupted request.

The emitted tokens are output, not prompt: penalties, min_tokens, bad words, grammars, repetition detection, max_tokens
and the draws count from the prompt's end.
"""

import contextlib

from headrace_engine.conformance.case import GREEDY_RESUME, DoesNotApply, case, case_for_each, expect
from headrace_engine.conformance.driver import Answer, EngineUnderTest, expect_same
from headrace_engine.conformance.endings import BIAS, last_new_token, own_end_tokens
from headrace_engine.conformance.logprobs import values
from headrace_engine.conformance.variants import VARIANTS, Variant


@case_for_each(VARIANTS, lambda variant: variant.needs)
def a_cut_request_goes_on_as_if_it_were_whole(engine: EngineUnderTest, variant: Variant) -> None:
    """{}: resumed after the first, second, middle and last but one token, it equals the uninterrupted request."""
    whole = engine.run_one(variant.make(engine))
    expect(whole.error is None, f"the whole request ended with an error: {whole.error}")
    cuts = cuts_of(whole, variant)
    resumed = [engine.send(engine.again(whole.request, whole.tokens[:cut])) for cut in cuts]
    if engine.capabilities.cache_salt:  # with another salt no KV block is in the cache
        resumed.append(engine.send(engine.again(whole.request, whole.tokens[: cuts[-1]], cache_salt="another")))
        cuts.append(cuts[-1])
    engine.finish(*resumed)
    for cut, answer in zip(cuts, resumed, strict=True):
        expect_same([answer], [whole], f"resumed behind {cut} of {len(whole.tokens)} tokens")
        expect_same_logprobs(answer, whole)


@case(GREEDY_RESUME)
def emitted_tokens_are_not_sent_again(engine: EngineUnderTest) -> None:
    """The first output of a resumed request has the token after the emitted ones, and no emitted token."""
    whole = engine.run_one(engine.request(presence_penalty=1.0))
    answer = engine.send(engine.again(whole.request, whole.tokens[:10]))
    engine.await_first_tokens(answer)
    first = list(answer.tokens)
    engine.finish(answer)
    expect(first == whole.tokens[10 : 10 + len(first)], "the first output is not the token behind the emitted ones")


@case()
def an_attempt_that_had_ended_is_answered_at_once(engine: EngineUnderTest) -> None:
    """If the emitted tokens end by max_tokens, a stop or an end token, the answer is only the finish reason."""
    plain = engine.run_one(engine.request())
    requests = []
    with contextlib.suppress(DoesNotApply):
        requests.append(engine.request(stop_token_ids=[last_new_token(plain)[1]]))
        bias = {own_end_tokens(engine)[0]: 100.0}
        if BIAS.holds(engine.capabilities):
            requests.append(engine.request(ignore_eos=False, logit_bias=bias))
    ended = [plain, *engine.run(*requests)]
    for whole, answer in zip(
        ended, engine.run(*[engine.again(whole.request, whole.tokens) for whole in ended]), strict=True
    ):
        expect(not answer.tokens, f"an attempt that had ended with {whole.end} was given more tokens")
        expect(answer.end == whole.end, f"an attempt that had ended with {whole.end} now ends with {answer.end}")


@case()
def an_attempt_beside_others_that_had_ended(engine: EngineUnderTest) -> None:
    """A request that is answered at once does not delay others: a running request continues to its end."""
    plain = engine.run_one(engine.request(max_tokens=4))
    mate = engine.send(engine.request(max_tokens=30))
    engine.await_first_tokens(mate)
    engine.run_one(engine.again(plain.request, plain.tokens))
    engine.finish(mate)
    expect(len(mate.tokens) == 30, f"the request beside it has {len(mate.tokens)} of 30 tokens")


def cuts_of(whole: Answer, variant: Variant) -> list[int]:
    length = len(whole.tokens)
    places = {1, 2, length // 2, length - 1, *variant.cuts} & set(range(1, length))
    if not places:
        raise DoesNotApply(f"the whole request has {length} tokens, so that it cannot be cut")
    return sorted(places)


def expect_same_logprobs(answer: Answer, whole: Answer) -> None:
    emitted = len(answer.request.output_token_ids)
    for place, (entry, expected) in enumerate(zip(answer.logprobs, whole.logprobs[emitted:], strict=True)):
        expect(
            entry[0][0] == expected[0][0] and values(entry, expected),
            f"resumed behind {emitted} tokens, the log-probabilities of token {emitted + place + 1} differ",
        )
    expect(answer.prompt_logprobs is None, f"resumed behind {emitted} tokens, prompt_logprobs are sent again")
