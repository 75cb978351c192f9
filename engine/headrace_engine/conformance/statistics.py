"""Statistics of the steps: each claimed field has the right values."""

from collections.abc import Callable
from dataclasses import fields

from headrace_engine.conformance.case import DoesNotApply, case, case_for_each, expect, stat
from headrace_engine.conformance.driver import Answer, EngineUnderTest
from headrace_engine.core.outputs import StepStats

_ONE_PHASE = "phase_seconds.schedule"
_FIELDS = (*(field.name for field in fields(StepStats) if field.name != "preemptions"), _ONE_PHASE)
"""pressure.py checks the field preemptions."""


@case_for_each(_FIELDS, lambda name: [stat(name)])
def a_claimed_field_moves(engine: EngineUnderTest, name: str) -> None:
    """{}: the field changes with the work. A gauge is 0 again at the end of the work."""
    if name in _NEED_OPTIONS:
        raise DoesNotApply(f"needs {_NEED_OPTIONS[name]}")
    most = engine.config.scheduler.max_num_seqs
    requests = [engine.request(engine.prompt(10, i), max_tokens=6) for i in range(2 * most)]
    answers = engine.run_at_once(*requests)
    answers.append(engine.run_one(engine.request(engine.prompt(engine.info.max_model_len - 8), max_tokens=4)))
    answers.append(engine.run_one(engine.again(answers[-1].request)))
    engine.await_no_problem(lambda: _PROBLEMS[name](engine, answers))


@case()
def claimed_fields_exist(engine: EngineUnderTest) -> None:
    """Each name in the claim stats is a field of the statistics."""
    unknown = set(engine.capabilities.stats) - {field.name for field in fields(StepStats)} - {_ONE_PHASE}
    expect(not unknown, f"StepStats has no {', '.join(sorted(unknown))}")


@case(stat("kv_blocks_used"), stat("running"))
def aborted_requests_give_everything_back(engine: EngineUnderTest) -> None:
    """After an abort of all requests, none runs and no KV block is used."""
    victims = [engine.send(engine.request(engine.prompt(30, i), max_tokens=None)) for i in range(4)]
    engine.await_first_tokens(*victims)
    engine.abort(*victims)
    engine.fence()
    engine.await_no_problem(lambda: _left(engine.steps[-1]))


@case(stat("prefix_hit_tokens"))
def cached_tokens_are_told_with_the_answer(engine: EngineUnderTest) -> None:
    """A prompt that was computed before finds some of its tokens in the cache, and their number is reported."""
    prompt = engine.prompt(engine.info.max_model_len - 8, 2)
    first = engine.run_one(engine.request(prompt, max_tokens=2))
    second = engine.run_one(engine.request(prompt, max_tokens=2))
    expect(second.tokens == first.tokens, "cached tokens change the output")
    found = second.num_cached_tokens
    expect(0 < found < len(prompt), f"{found} of {len(prompt)} prompt tokens are cached")


def _left(last: StepStats) -> str | None:
    if last.running or last.kv_blocks_used:
        return f"{last.running} requests run and {last.kv_blocks_used} KV blocks are used"
    return None


def _levels(
    name: str, highest: Callable[[EngineUnderTest], int]
) -> Callable[[EngineUnderTest, list[Answer]], str | None]:
    """Check that a level rises to at least `highest`, and is 0 at the end."""

    def problem(engine: EngineUnderTest, _: list[Answer]) -> str | None:
        values = [getattr(step, name) for step in engine.steps]
        if max(values) < highest(engine):
            return f"the highest {name} is {max(values)}, expected at least {highest(engine)}"
        return f"the last {name} is {values[-1]}, expected 0" if values[-1] else None

    return problem


def _sum(name: str, least: Callable[[list[Answer]], int]) -> Callable[[EngineUnderTest, list[Answer]], str | None]:
    def problem(engine: EngineUnderTest, answers: list[Answer]) -> str | None:
        total = sum(getattr(step, name) for step in engine.steps)
        return None if total >= least(answers) else f"all steps together have {name} {total}, expected {least(answers)}"

    return problem


def _not_negative(name: str) -> Callable[[EngineUnderTest, list[Answer]], str | None]:
    def problem(engine: EngineUnderTest, _: list[Answer]) -> str | None:
        wrong = [getattr(step, name) for step in engine.steps if not getattr(step, name) >= 0]
        return f"{name} is {wrong[0]}" if wrong else None

    return problem


def _computed_tokens(answers: list[Answer]) -> int:
    """Return the number of tokens that must be computed: all output tokens except the last one of each request."""
    return sum(len(answer.tokens) - 1 for answer in answers)


def _kinds(engine: EngineUnderTest, _: list[Answer]) -> str | None:
    kinds = {step.kind for step in engine.steps if step.num_tokens}
    if not kinds <= {"prefill", "decode", "mixed"}:
        return f"kinds of steps are {', '.join(sorted(kinds))}"
    return None if "decode" in kinds and kinds & {"prefill", "mixed"} else f"all steps are {', '.join(kinds)}"


def _free_blocks(engine: EngineUnderTest, _: list[Answer]) -> str | None:
    last, claimed = engine.steps[-1], engine.capabilities.stats
    cached = last.kv_blocks_cached if "kv_blocks_cached" in claimed else 0
    if last.kv_blocks_free + cached != last.kv_blocks_total:
        return f"{last.kv_blocks_free} free and {cached} cached KV blocks of {last.kv_blocks_total} at the end"
    busy = min(step.kv_blocks_free + (step.kv_blocks_cached if cached else 0) for step in engine.steps)
    return None if busy < last.kv_blocks_total else "kv_blocks_free never falls"


def _total_blocks(engine: EngineUnderTest, _: list[Answer]) -> str | None:
    totals = {step.kv_blocks_total for step in engine.steps}
    return None if len(totals) == 1 and min(totals) > 0 else f"kv_blocks_total is {sorted(totals)}"


def _hits(engine: EngineUnderTest, answers: list[Answer]) -> str | None:
    hits = sum(step.prefix_hit_tokens for step in engine.steps)
    told = sum(answer.num_cached_tokens for answer in answers)
    return None if hits > 0 and told > 0 else f"prefix_hit_tokens is {hits} in all, the answers tell of {told}"


def _admitted(engine: EngineUnderTest, answers: list[Answer]) -> str | None:
    told = [name for step in engine.steps for name in step.admitted_choice_ids]
    expected = {answer.id for answer in answers}
    return (
        None if sorted(told) == sorted(expected) else f"{len(told)} admissions of {len(expected)} requests are reported"
    )


def _phases(engine: EngineUnderTest, _: list[Answer]) -> str | None:
    return None if sum(sum(step.phase_seconds.values()) for step in engine.steps) > 0 else "all phases took 0 s"


def _schedule_phase(engine: EngineUnderTest, _: list[Answer]) -> str | None:
    seconds = sum(step.phase_seconds.get("schedule", 0.0) for step in engine.steps)
    return None if seconds > 0 else "the phase schedule took 0 s"


def _cached_blocks(engine: EngineUnderTest, _: list[Answer]) -> str | None:
    return None if engine.steps[-1].kv_blocks_cached > 0 else "no KV block is cached after requests have ended"


_NEED_OPTIONS = {
    "lora_requests": "enable_lora and an adapter",
    "drafted_per_position": "speculative_config",
    "accepted_per_position": "speculative_config",
}
_PROBLEMS: dict[str, Callable[[EngineUnderTest, list[Answer]], str | None]] = {
    "step_seconds": lambda e, _: None if sum(s.step_seconds for s in e.steps) > 0 else "all steps took 0 s",
    "kind": _kinds,
    "num_tokens": _sum("num_tokens", _computed_tokens),
    "num_requests": _sum("num_requests", _computed_tokens),
    "running": _levels("running", lambda e: e.config.scheduler.max_num_seqs),
    "waiting": _levels("waiting", lambda _: 1),
    "kv_blocks_used": _levels("kv_blocks_used", lambda _: 1),
    "kv_blocks_cached": _cached_blocks,
    "kv_blocks_free": _free_blocks,
    "kv_blocks_total": _total_blocks,
    "prefix_queried_tokens": _sum("prefix_queried_tokens", lambda answers: len(answers[-1].request.prompt_token_ids)),
    "prefix_hit_tokens": _hits,
    "phase_seconds": _phases,
    _ONE_PHASE: _schedule_phase,
    "num_padded_tokens": _not_negative("num_padded_tokens"),
    "compiled_graphs": _not_negative("compiled_graphs"),
    "fallback_operators": _not_negative("fallback_operators"),
    "warm_up_seconds": _not_negative("warm_up_seconds"),
    "admitted_choice_ids": _admitted,
}
