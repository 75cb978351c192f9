"""Models that compute one row of numbers for each input: embeddings, scores and classes."""

import contextlib
import os
import signal
from typing import Any

from headrace_engine.conformance.case import DoesNotApply, Stage, case, expect, feature
from headrace_engine.conformance.driver import EngineUnderTest
from headrace_engine.conformance.launcher import Launcher
from headrace_engine.conformance.rows import expect_equal_rows, numbers_of
from headrace_engine.errors import EngineDeadError
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_engine.runner.contracts import PoolingInfo

_SOME = 24
_STEPS_OF_A_JOB = 12


@case()
def each_input_has_one_row(engine: EngineUnderTest) -> None:
    """A request has one row of finite float32 numbers for each input, of the length that the engine claims."""
    info = info_of(engine)
    for task in info.tasks:
        [found] = engine.pool(engine.pooling_request(3, task=task))
        width = 1 if task == "score" else info.dimensions
        expect(found.error is None, f"{task} ends with the error {found.error}")
        wrong = [len(row) // 4 for row in found.data if len(row) != 4 * width]
        expect(not wrong, f"{task} has a row of {wrong[:1]} numbers, expected {width}")


@case()
def a_row_does_not_depend_on_its_neighbours(engine: EngineUnderTest) -> None:
    """Inputs of mixed lengths have the same rows alone, together and in another order: the same bytes if claimed."""
    info = info_of(engine)
    whole = engine.pooling_request(_SOME)
    [together] = engine.pool(whole)
    alone = engine.pool(*[engine.pooling_again(whole, [tokens]) for tokens in whole.inputs])
    rows = [row for found in alone for row in found.data]
    expect_equal_rows(rows, together.data, "alone against together", exactly=info.batch_invariant)
    [turned] = engine.pool(engine.pooling_again(whole, whole.inputs[::-1]))
    expect_equal_rows(turned.data[::-1], together.data, "in another order", exactly=info.batch_invariant)


@case()
def a_resumed_request_has_the_missing_rows(engine: EngineUnderTest) -> None:
    """A request that continues at input k has the rows from k on, with the indices of the whole message."""
    info = info_of(engine)
    whole = engine.pooling_request(_SOME)
    [expected] = engine.pool(whole)
    for cut in (1, _SOME // 2, _SOME - 1):
        [found] = engine.pool(engine.pooling_again(whole, whole.inputs[cut:], first=cut))
        expect_equal_rows(found.data, expected.data[cut:], f"resumed at input {cut}", exactly=info.batch_invariant)


@case()
def an_aborted_request_frees_the_engine(engine: EngineUnderTest) -> None:
    """An aborted request has no more rows after the engine has read the abort. Requests beside it are complete."""
    with engine.stopped():
        victim, mate = engine.send_inputs(job_of(engine)), engine.send_inputs(engine.pooling_request(_SOME))
    engine.wait_until(lambda: bool(victim.data), lambda: "the request has no first row")
    engine.abort_rows(victim)
    engine.finish_rows(mate)
    engine.fence()
    count = len(victim.data)
    engine.pool(engine.pooling_request(_SOME))
    expect(len(victim.data) == count, "the aborted request has more rows")
    expect(len(mate.data) == _SOME, f"a request beside it has {len(mate.data)} of {_SOME} rows")


@case()
def a_short_request_does_not_wait_for_a_long_one(engine: EngineUnderTest) -> None:
    """A request with one input ends while a request of many steps that came before it still runs."""
    with engine.stopped():
        job, query = engine.send_inputs(job_of(engine)), engine.send_inputs(engine.pooling_request(1))
    engine.finish_rows(job, query)
    expect(query.last_step < job.last_step, f"it ended in step {query.last_step}, the long one in {job.last_step}")


@case(feature("priority"))
def a_better_priority_overtakes(engine: EngineUnderTest) -> None:
    """Of two requests that come together, the one with the better priority ends before the other one begins."""
    with engine.stopped():
        later = engine.send_inputs(job_of(engine, priority=5))
        first = engine.send_inputs(job_of(engine, priority=0))
    engine.finish_rows(later, first)
    begun = later.first_step
    # the engine may have read the first frame alone
    expect(first.last_step <= begun or begun == 1, f"it ended in step {first.last_step}, the other began in {begun}")
    expect(first.last_step < later.last_step, "the better priority ended later")


@case()
def a_wrong_request_ends_with_its_reason(engine: EngineUnderTest) -> None:
    """A too long or empty input, no input, and a task that the model lacks end with an error. Others continue."""
    info = info_of(engine)
    limit = info.max_input_tokens
    wrong = [
        engine.pooling_request(1, lengths=[limit + 1]),
        engine.pooling_again(engine.pooling_request(2), [engine.prompt(3), []]),
        engine.pooling_again(engine.pooling_request(1), []),
        *(engine.pooling_request(1, task=task) for task in ("embed", "score", "classify") if task not in info.tasks),
    ]
    answers = [engine.send_inputs(request) for request in wrong]
    good = engine.send_inputs(engine.pooling_request(_SOME))
    engine.finish_rows(good, *answers)
    expect(all(found.error for found in answers), "a wrong request ends without an error")
    expect(good.error is None, f"a request beside them ends with {good.error}")


@case()
def a_request_to_generate_is_refused(engine: EngineUnderTest) -> None:
    """A request to generate ends with an error. The engine continues."""
    generate = engine.request(max_tokens=1)
    answer = engine.await_rows(PoolingCoreRequest(request_id=generate.request_id, task="embed", inputs=[]))
    engine.core.add_request(generate)
    engine.finish_rows(answer)
    expect(answer.error, "it ends without an error")
    engine.pool(engine.pooling_request(1))


@case()
def embeddings_are_cut_before_they_are_normalised(engine: EngineUnderTest) -> None:
    """With `dimensions` and `normalize`, a row is the beginning of the whole one, with the length 1."""
    info = info_of(engine)
    if "embed" not in info.tasks:
        raise DoesNotApply("the model does not embed")
    width = min((*info.matryoshka_dimensions, info.dimensions))
    if width == info.dimensions and not info.takes_any_dimensions:
        raise DoesNotApply("the model has only one length")
    width = width if width < info.dimensions else info.dimensions // 2
    whole = engine.pooling_request(4, normalize=True)
    [full] = engine.pool(whole)
    [cut] = engine.pool(engine.pooling_again(whole, whole.inputs, dimensions=width))
    for row, short in zip(full.data, cut.data, strict=True):
        numbers, kept = numbers_of(row), numbers_of(short)
        expect(len(kept) == width, f"the row has {len(kept)} numbers, asked were {width}")
        expect(abs(sum(x * x for x in kept) - 1) < 1e-3, "the row does not have the length 1")
        scale = sum(x * x for x in numbers[:width]) ** 0.5
        apart = max(abs(x / scale - y) for x, y in zip(numbers, kept, strict=False))
        expect(apart < 1e-3, f"the row is not the beginning of the whole one: {apart:.1e} apart")


@case()
def a_pair_is_not_its_reverse(engine: EngineUnderTest) -> None:
    """The row of a pair of texts (a, b) differs from that of (b, a)."""
    info = info_of(engine)
    if "score" not in info.tasks:
        raise DoesNotApply("the model does not score pairs")
    one, other = engine.prompt(8), engine.prompt(8, 9)
    if one == other:
        raise DoesNotApply("the two texts have the same tokens")
    request = engine.pooling_again(engine.pooling_request(1, task="score"), [one + other, other + one])
    request.second_from = [len(one), len(other)]
    request.activation = False
    [found] = engine.pool(request)
    expect(found.data[0] != found.data[1], "both orders have the same row")


@case(stage=Stage.NONE)
def a_new_process_has_the_same_rows(launcher: Launcher) -> None:
    """After kill -9 of the engine, another process computes the rows that were missing."""
    engine = launcher.start()
    try:
        info = info_of(engine)
        whole = engine.pooling_request(_SOME)
        [expected] = engine.pool(whole)
        engine.send_inputs(engine.pooling_again(whole, whole.inputs))
        os.kill(engine.core.pid, signal.SIGKILL)
        with contextlib.suppress(EngineDeadError):
            engine.wait_until(lambda: False, lambda: "the engine's end is not noticed")
    finally:
        engine.close()
    second = launcher.start()
    try:
        cut = _SOME // 3
        [found] = second.pool(second.pooling_again(whole, whole.inputs[cut:], first=cut))
        expect_equal_rows(found.data, expected.data[cut:], "of another process", exactly=info.batch_invariant)
    finally:
        second.close()


def info_of(engine: EngineUnderTest) -> PoolingInfo:
    assert engine.info.pooling is not None
    return engine.info.pooling


def job_of(engine: EngineUnderTest, **options: Any) -> PoolingCoreRequest:
    """Return a request that needs several steps."""
    info = info_of(engine)
    length = max(1, min(info.max_input_tokens, info.max_step_tokens // 4, 64))
    count = min(2048, _STEPS_OF_A_JOB * -(-info.max_step_tokens // length))
    return engine.pooling_request(count, lengths=[length] * count, **options)
