"""Admission: many requests at once, the order of arrival, priorities, choices of one prompt, salts."""

from headrace_engine.conformance.case import DRAWS, Stage, case, expect, feature
from headrace_engine.conformance.driver import EngineUnderTest, expect_same


@case()
def many_at_once_are_all_answered(engine: EngineUnderTest) -> None:
    """If three times max_num_seqs requests are sent at once, each ends with as many tokens as it asked for."""
    count = 3 * engine.config.scheduler.max_num_seqs
    answers = engine.run_at_once(
        *[engine.request(engine.prompt(5 + i % 9, i), max_tokens=2 + i % 7) for i in range(count)]
    )
    wrong = [answer.end for answer in answers if answer.end != ("length", None)]
    expect(not wrong, f"{len(wrong)} of {count} requests did not end with length, the first one with {wrong[:1]}")
    short = [a for a in answers if len(a.tokens) != a.request.sampling_params.max_tokens]
    expect(not short, f"{len(short)} of {count} requests have fewer tokens than max_tokens")


@case()
def first_come_first_served(engine: EngineUnderTest) -> None:
    """Without priorities, requests get their first tokens in the order of arrival."""
    requests = [engine.request(engine.prompt(8, i), max_tokens=6) for i in range(3 * _most(engine))]
    steps = [answer.first_step for answer in engine.run_at_once(*requests)]
    expect(steps == sorted(steps), f"in the order of their arrival they had their first tokens in steps {steps}")


@case(feature("priority"), stage=Stage.TIGHT)
def the_smaller_priority_is_served_first(engine: EngineUnderTest) -> None:
    """With scheduling_policy="priority", waiting requests are admitted by priority, the smallest number first."""
    priorities = [3, 0, 2, 1] * _most(engine)
    with engine.while_running(
        lambda: [engine.request(max_tokens=None, priority=-1) for _ in range(_most(engine))]
    ) as busy:
        waiting = [engine.send(engine.request(max_tokens=4, priority=priority)) for priority in priorities]
    engine.finish(*busy, *waiting)
    found = sorted((answer.first_step, answer.request.priority) for answer in waiting)
    order = [priority for _, priority in found]
    expect(order == sorted(order), f"requests had their first tokens in the order of the priorities {order}")


@case()
def choices_of_one_prompt(engine: EngineUnderTest) -> None:
    """Several choices of one prompt (n) are separate requests. Each ends, and equals the same request alone."""
    temperature = 0.0 if engine.capabilities.draws is None else 1.0
    requests = [engine.request(temperature=temperature, seed=seed, max_tokens=12) for seed in (5, 6, 7)]
    together = engine.run(*requests)
    alone = [engine.run_one(engine.again(request)) for request in requests]
    expect_same(together, alone, "choices together against each alone")


@case(DRAWS)
def choices_with_seeds_of_their_own_differ(engine: EngineUnderTest) -> None:
    """Choices of one prompt with different seeds are not all equal."""
    answers = engine.run(*[engine.request(temperature=1.0, seed=seed) for seed in (1, 2, 3, -4)])
    expect(len({tuple(answer.tokens) for answer in answers}) > 1, "four choices with four seeds have the same tokens")


@case(feature("cache_salt"))
def a_salt_divides_the_prefix_cache(engine: EngineUnderTest) -> None:
    """A prompt finds cached tokens of prompts with the same cache_salt, and none of prompts with another one."""
    prompt = engine.prompt(engine.info.max_model_len - 8, 3)

    def cached(salt: str) -> int:
        return engine.run_one(engine.request(prompt, cache_salt=salt, max_tokens=2)).num_cached_tokens

    expect(cached("a") == 0, "the first prompt of its cache_salt found cached tokens")
    expect(cached("b") == 0, "a prompt found cached tokens of another cache_salt")
    expect(cached("a") > 0, "a prompt that was sent before with the same cache_salt found no cached tokens")


def _most(engine: EngineUnderTest) -> int:
    return engine.config.scheduler.max_num_seqs
