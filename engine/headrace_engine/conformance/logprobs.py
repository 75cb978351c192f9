"""Log-probabilities of drawn tokens and of prompts."""

import itertools

from headrace_engine.conformance.case import case, expect, feature
from headrace_engine.conformance.driver import EngineUnderTest
from headrace_engine.runner.contracts import TokenLogprobs

VALUES_AGREE = 1e-3


@case()
def the_drawn_token_comes_first(engine: EngineUnderTest) -> None:
    """logprobs=4 gives the drawn token first, then the four most likely ones. Ranks begin at 1."""
    for answer in engine.run(engine.request(logprobs=4), engine.request(logprobs=4, temperature=1.5, seed=3)):
        for token, entry in zip(answer.tokens, answer.logprobs, strict=True):
            expect(entry[0][0] == token, "the first entry is not the drawn token's")
            check_entry(entry, 4)


@case()
def greedy_draws_rank_first(engine: EngineUnderTest) -> None:
    """A greedy token has rank 1 if no parameter changes the logits."""
    answer = engine.run_one(engine.request(logprobs=1))
    expect(all(entry[0][2] == 1 for entry in answer.logprobs), "a greedy token has another rank than 1")


@case()
def none_but_the_drawn_token(engine: EngineUnderTest) -> None:
    """logprobs=0 gives only the entry of the drawn token."""
    answer = engine.run_one(engine.request(logprobs=0))
    expect(all(len(entry) == 1 for entry in answer.logprobs), "there are entries beside the drawn token's")


@case()
def values_are_the_models_own(engine: EngineUnderTest) -> None:
    """Log-probabilities come from the raw logits. No parameter of the request changes them."""
    plain, changed = engine.run(
        engine.request(logprobs=20, max_tokens=1),
        engine.request(logprobs=20, max_tokens=1, temperature=2.0, repetition_penalty=3.0, top_k=3),
    )
    expect(
        values(changed.logprobs[0], plain.logprobs[0]), "log-probabilities of one position differ between two requests"
    )


@case()
def a_neighbour_that_wants_some_changes_nothing(engine: EngineUnderTest) -> None:
    """Each request of a batch gets as many log-probabilities as it asked for."""
    answers = engine.run(*[engine.request(engine.prompt(9, i), logprobs=count) for i, count in enumerate((1, 7, 3))])
    for answer, count in zip(answers, (1, 7, 3), strict=True):
        for entry in answer.logprobs:
            check_entry(entry, count)


@case(feature("logprob_token_ids"))
def named_tokens_have_the_values_that_all_tokens_have(engine: EngineUnderTest) -> None:
    """logprob_token_ids gives the drawn token first, then these tokens with their ranks, whatever a neighbour wants."""
    plain = engine.run_one(engine.request(logprobs=20, max_tokens=1))
    expected = plain.logprobs[0][2:12:3]
    named = [token for token, _, _ in reversed(expected)]
    asking, neighbour = engine.run(
        engine.request(logprob_token_ids=named, max_tokens=1), engine.request(engine.prompt(9, 1), logprobs=3)
    )
    for entry in neighbour.logprobs:
        check_entry(entry, 3)
    found = asking.logprobs[0]
    expect(found[0][0] == asking.tokens[0], "the first entry is not the drawn token's")
    expect([entry[0] for entry in found[1:]] == named, "the entries are not those of the named tokens, in their order")
    expect(values(found[1:], expected[::-1]), "log-probabilities differ from those of the most likely tokens")
    expect([entry[2] for entry in found[1:]] == [entry[2] for entry in expected[::-1]], "ranks differ")


@case(feature("prompt_logprobs"))
def a_prompt_has_them_from_its_second_token(engine: EngineUnderTest) -> None:
    """prompt_logprobs comes with the first token. It has an entry for each prompt token except the first."""
    prompt = engine.prompt(21, 1)
    answer = engine.send(engine.request(prompt, prompt_logprobs=2))
    engine.await_first_tokens(answer)
    found = answer.prompt_logprobs
    engine.finish(answer)
    expect(found is not None, "the first token came without prompt_logprobs")
    assert found is not None
    expect(len(found) == len(prompt) - 1, f"there are {len(found)} entries for {len(prompt)} prompt tokens")
    for token, entry in zip(prompt[1:], found, strict=True):
        expect(entry[0][0] == token, "the first entry of a prompt token is another token's")
        check_entry(entry, 2)


@case(feature("prompt_logprobs"))
def those_of_prompt_and_output_agree(engine: EngineUnderTest) -> None:
    """The log-probabilities of an output equal those of the same tokens in a prompt, within 0.001, cached or not."""
    answer = engine.run_one(engine.request(logprobs=3))
    whole = [*answer.request.prompt_token_ids, *answer.tokens]
    for _ in range(2):
        again = engine.run_one(engine.request(whole, prompt_logprobs=3, max_tokens=1))
        found = (again.prompt_logprobs or [])[-len(answer.tokens) :]
        expect(len(found) == len(answer.tokens), f"there are {len(again.prompt_logprobs or [])} entries for the prompt")
        for place, (prompt_entry, entry) in enumerate(zip(found, answer.logprobs, strict=True)):
            expect(values(prompt_entry, entry), f"the entries of output token {place + 1} differ")


def check_entry(entry: TokenLogprobs, count: int) -> None:
    """Check one position: the ranks, the order of the values, and that `count` most likely tokens are reported."""
    drawn, others = entry[0], entry[1:]
    expect(all(value <= 1e-6 for _, value, _ in entry), "a log-probability is above 0")
    ids = [token for token, _, _ in entry]
    expect(len(set(ids)) == len(ids), "a token has two entries of one position")
    ranks = [rank for _, _, rank in others]
    expected = [rank for rank in range(1, count + 1) if rank != drawn[2]]
    expect(ranks == expected, f"the drawn token has rank {drawn[2]}, the others {ranks}, expected {expected}")
    ordered = sorted(entry, key=lambda candidate: candidate[2])
    falling = all(a[1] >= b[1] - 1e-6 for a, b in itertools.pairwise(ordered))
    expect(falling, "a token of a higher rank is more likely than one of a lower rank")


def values(found: TokenLogprobs, expected: TokenLogprobs) -> bool:
    """Whether the tokens in both entries have the same values. At most one token may be in one entry only."""
    known = {token: value for token, value, _ in expected}
    shared = [(value, known[token]) for token, value, _ in found if token in known]
    return len(shared) >= min(len(found), len(expected)) - 1 and all(abs(a - b) <= VALUES_AGREE for a, b in shared)
