"""Chunked prompts and preemption. Few KV blocks and few tokens in a step must not change answers."""

from typing import Any

from headrace_engine.conformance.case import (
    DRAWS,
    GREEDY_RESUME,
    SAMPLED_RESUME,
    DoesNotApply,
    Stage,
    case,
    expect,
    feature,
    stat,
)
from headrace_engine.conformance.driver import Answer, EngineUnderTest, expect_same
from headrace_engine.conformance.resume import expect_same_logprobs
from headrace_engine.requests.request import EngineCoreRequest

TOKENS_A_STEP = 32
MAX_NUM_SEQS = 4


def long_requests(engine: EngineUnderTest) -> list[EngineCoreRequest]:
    """Return requests whose prompts take several steps, and that together need more KV blocks than there are.

    The greedy requests come first.
    """
    most = engine.info.max_model_len
    params: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 1.5, "logprobs": 2},
        {"frequency_penalty": 0.7},
        {"temperature": 1.0},
        {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.6},
        {"temperature": 1.0, "frequency_penalty": 0.5},
    ]
    return [
        engine.request(engine.prompt(most // 4 + 5 * i, 2 + i), max_tokens=most // 2 - 10, seed=i, **more)
        for i, more in enumerate(params)
    ]


@case(stage=Stage.TIGHT)
def chunked_prompts_change_no_token(engine: EngineUnderTest) -> None:
    """A greedy request has the same tokens whether its prompt is computed in one step or in several."""
    whole = engine.references[0]
    expect_same([engine.run_one(engine.again(whole.request))], [whole], "the prompt in chunks against in one step")


@case(feature("prompt_logprobs"), stage=Stage.TIGHT)
def chunked_prompts_have_all_their_logprobs(engine: EngineUnderTest) -> None:
    """prompt_logprobs of a prompt that takes several steps are complete, and come with the first token."""
    prompt = engine.prompt(3 * TOKENS_A_STEP + 5)
    answer = engine.run_one(engine.request(prompt, prompt_logprobs=1, max_tokens=3))
    count = len(answer.prompt_logprobs or ())
    expect(count == len(prompt) - 1, f"there are {count} entries for {len(prompt)} prompt tokens")


@case(stage=Stage.TIGHT)
def preemption_changes_no_greedy_token(engine: EngineUnderTest) -> None:
    """Greedy requests that together exceed the KV blocks end as they do with enough blocks."""
    greedy = _references(engine, greedy=True)
    answers = _run_again(engine, greedy, [0] * len(greedy))
    expect_same(answers, greedy, "with few KV blocks against many")
    for answer, whole in zip(answers, greedy, strict=True):
        expect_same_logprobs(answer, whole)


@case(DRAWS, SAMPLED_RESUME, stage=Stage.TIGHT)
def preemption_changes_no_sampled_token(engine: EngineUnderTest) -> None:
    """Sampled requests that together exceed the KV blocks end as they do with enough blocks."""
    sampled = _references(engine, greedy=False)
    answers = _run_again(engine, sampled, [0] * len(sampled))
    expect_same(answers, sampled, "with few KV blocks against many")


@case(GREEDY_RESUME, stage=Stage.TIGHT)
def a_resume_under_pressure_is_exact_for_greedy(engine: EngineUnderTest) -> None:
    """Greedy requests that resume beside chunked prompts and preemptions equal uninterrupted ones."""
    _resume_all(engine, _references(engine, greedy=True))


@case(DRAWS, SAMPLED_RESUME, stage=Stage.TIGHT)
def a_resume_under_pressure_is_exact_for_sampled(engine: EngineUnderTest) -> None:
    """Sampled requests that resume beside chunked prompts and preemptions equal uninterrupted ones."""
    _resume_all(engine, _references(engine, greedy=False))


@case(stat("preemptions"), stage=Stage.TIGHT)
def preemptions_are_counted(engine: EngineUnderTest) -> None:
    """The statistic preemptions counts requests that lose their KV blocks to others."""
    engine.run(*[engine.again(answer.request) for answer in engine.references])
    count = sum(step.preemptions for step in engine.steps)
    if engine.config.cache.num_blocks is None and not count:
        raise DoesNotApply("the engine takes no num_blocks, so that its KV memory cannot be made small")
    expect(
        count > 0, f"no preemption was counted though num_blocks={engine.config.cache.num_blocks} is too few for all"
    )


def _references(engine: EngineUnderTest, *, greedy: bool) -> list[Answer]:
    return [answer for answer in engine.references if answer.request.sampling_params.is_greedy == greedy]


def _run_again(engine: EngineUnderTest, wholes: list[Answer], cuts: list[int]) -> list[Answer]:
    """Resume each request of `wholes` after its number of tokens in `cuts`, beside all other requests."""
    fillers = [engine.send(engine.again(a.request)) for a in engine.references if a not in wholes]
    pairs = zip(wholes, cuts, strict=True)
    answers = engine.run(*[engine.again(whole.request, whole.tokens[:cut]) for whole, cut in pairs])
    engine.finish(*fillers)
    return answers


def _resume_all(engine: EngineUnderTest, wholes: list[Answer]) -> None:
    cuts = [len(whole.tokens) * (2 + i) // (4 + i) for i, whole in enumerate(wholes)]
    expect_same(_run_again(engine, wholes, cuts), wholes, "resumed under pressure")
