"""Effects of sampling parameters on tokens. For greedy requests they are computed from the log-probabilities."""

from collections.abc import Callable
from typing import Any

from headrace_engine.conformance.case import DRAWS, case, case_for_each, expect, feature, limit
from headrace_engine.conformance.driver import Answer, EngineUnderTest, expect_same
from headrace_engine.conformance.endings import BIAS

_ONE_CANDIDATE: dict[str, dict[str, Any]] = {
    "top_k=1": {"top_k": 1},
    "top_p=1e-9": {"top_p": 1e-9},
    "min_p=1": {"min_p": 1.0},
    "temperature=1e-6": {"temperature": 1e-6},
}
_ROUNDING = 1e-3


@case()
def greedy_is_independent_of_the_batch(engine: EngineUnderTest) -> None:
    """A greedy request has the same tokens alone and beside others (in float32)."""
    requests = [engine.request(engine.prompt(10 + 7 * i, i)) for i in range(4)]
    alone = [engine.run_one(engine.again(request)) for request in requests]
    fillers = [engine.send(engine.request(engine.prompt(30, 9 + i), temperature=1.0, seed=i)) for i in range(4)]
    together = engine.run(*requests)
    engine.finish(*fillers)
    expect_same(together, alone, "together against alone")


@case(DRAWS)
def equal_seeds_give_equal_draws(engine: EngineUnderTest) -> None:
    """A sampled request has the same tokens again if its seed is the same."""
    request = engine.request(temperature=1.0, seed=77)
    first, second = engine.run_one(request), engine.run_one(engine.again(request))
    expect_same([second], [first], "the second run against the first")


@case(DRAWS)
def draws_are_independent_of_the_batch(engine: EngineUnderTest) -> None:
    """A sampled request has the same tokens alone, beside others, and beside others in another order."""
    requests = [
        engine.request(engine.prompt(10 + 7 * i, i), temperature=0.6 + 0.2 * i, seed=i, top_p=0.95) for i in range(4)
    ]
    alone = [engine.run_one(engine.again(request)) for request in requests]
    fillers = [engine.send(engine.request(engine.prompt(30, 9 + i), temperature=1.0, seed=i)) for i in range(3)]
    together = engine.run(*requests)
    engine.finish(*fillers)
    backwards = engine.run(*[engine.again(request) for request in reversed(requests)])
    expect_same(together, alone, "together against alone")
    expect_same(reversed(backwards), alone, "together in another order against alone")


@case(DRAWS)
def other_seeds_give_other_draws(engine: EngineUnderTest) -> None:
    """Sampled requests that differ only in their seeds have different tokens."""
    answers = engine.run(*[engine.request(temperature=1.5, seed=seed) for seed in (1, 2, 3)])
    expect(len({tuple(a.tokens) for a in answers}) == 3, "requests with different seeds have the same tokens")


@case_for_each(tuple(_ONE_CANDIDATE), lambda _: ())
def one_candidate_is_greedy(engine: EngineUnderTest, name: str) -> None:
    """{} leaves one candidate, so the tokens are the greedy ones."""
    greedy = engine.run_one(engine.request(engine.prompt(15, 4)))
    sampled = engine.run_one(engine.request(engine.prompt(15, 4), **{"temperature": 1.0, **_ONE_CANDIDATE[name]}))
    expect_same([sampled], [greedy], "sampled against greedy")


@case()
def presence_penalty_counts_each_token_once(engine: EngineUnderTest) -> None:
    """presence_penalty lowers the logit of each token of the output once, however often the token occurs."""
    answer = engine.run_one(engine.request(presence_penalty=1.5, logprobs=20, max_tokens=40))
    _expect_greedy_by_hand(answer, lambda output, token: -1.5 * (token in output))


@case()
def frequency_penalty_counts_each_time(engine: EngineUnderTest) -> None:
    """frequency_penalty lowers the logit of a token once for each time that it occurs in the output."""
    answer = engine.run_one(engine.request(frequency_penalty=0.9, logprobs=20, max_tokens=40))
    _expect_greedy_by_hand(answer, lambda output, token: -0.9 * output.count(token))


@case()
def repetition_penalty_makes_tokens_rarer(engine: EngineUnderTest) -> None:
    """A repetition_penalty far above 1 does not repeat more tokens of prompt and output than no penalty does."""
    prompt = engine.prompt(20, 2)
    plain, penalised = engine.run(
        engine.request(prompt, max_tokens=40), engine.request(prompt, max_tokens=40, repetition_penalty=20.0)
    )

    def repeated(answer: Answer) -> int:
        seen, count = set(prompt), 0
        for token in answer.tokens:
            count += token in seen
            seen.add(token)
        return count

    expect(
        repeated(penalised) < max(repeated(plain), 1),
        f"{repeated(penalised)} of 40 tokens are repeated, {repeated(plain)} without a penalty",
    )


@case(BIAS)
def logit_bias_is_added(engine: EngineUnderTest) -> None:
    """logit_bias is added to the logits of its tokens: 100 makes a token certain, -100 makes it impossible."""
    plain = engine.run_one(engine.request(logprobs=5))
    first, second = plain.logprobs[0][0][0], plain.logprobs[0][1][0]
    chosen, forbidden, nudged = engine.run(
        engine.request(logit_bias={second: 100.0}, max_tokens=5),
        engine.request(logit_bias={first: -100.0}),
        engine.request(logit_bias={first: -1.25, second: 0.75}, logprobs=20),
    )
    expect(chosen.tokens == [second] * 5, "a bias of 100 does not make a token certain")
    expect(first not in forbidden.tokens, "a token with a bias of -100 was drawn")
    _expect_greedy_by_hand(nudged, lambda _, token: {first: -1.25, second: 0.75}.get(token, 0.0))


@case(limit("max_allowed_token_ids", 8))
def allowed_token_ids_are_the_only_ones(engine: EngineUnderTest) -> None:
    """No token outside of allowed_token_ids is drawn, greedy or sampled."""
    allowed = [token for token in range(engine.info.vocab_size) if token not in engine.end_tokens][3:11]
    answers = engine.run(
        engine.request(allowed_token_ids=allowed), engine.request(allowed_token_ids=allowed, temperature=1.5)
    )
    for answer in answers:
        expect(set(answer.tokens) <= set(allowed), "a token outside of allowed_token_ids was drawn")


@case(feature("bad_words"))
def bad_words_are_not_completed(engine: EngineUnderTest) -> None:
    """The token that would complete a bad word is not drawn. The tokens before it are allowed."""
    whole = engine.run_one(engine.request())
    word = whole.tokens[6:9]
    start = next(i for i in range(24) if whole.tokens[i : i + 3] == word)
    long, short = engine.run(engine.request(bad_words=[word]), engine.request(bad_words=[[whole.tokens[0]]]))
    expect(long.tokens[: start + 2] == whole.tokens[: start + 2], "tokens that complete no bad word are others")
    places = [i for i in range(len(long.tokens)) if long.tokens[i : i + 3] == word]
    expect(not places, "a bad word of three tokens stands in the output")
    expect(whole.tokens[0] not in short.tokens, "a bad word of one token stands in the output")


def _expect_greedy_by_hand(answer: Answer, change: Callable[[list[int], int], float]) -> None:
    """Expect that every token is the best candidate after `change` is added to the raw log-probabilities.

    A token is not judged if a candidate that was not returned might be better.
    """
    judged = 0
    for place, (token, candidates) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        output = answer.tokens[:place]
        values = {candidate: value + change(output, candidate) for candidate, value, _ in candidates}
        least = min(value for _, value, _ in candidates)
        best = max(values.values())
        if best < least:
            continue
        judged += 1
        expect(
            values[token] >= best - _ROUNDING,
            f"token {place + 1} is {token} with {values[token]:.4f}, the best candidate has {best:.4f}",
        )
    expect(judged > 0, "no token could be judged by its log-probabilities")
