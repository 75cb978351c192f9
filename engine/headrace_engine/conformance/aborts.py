"""Aborts of running, waiting, finished and unknown requests."""

from headrace_engine.conformance.case import case, expect
from headrace_engine.conformance.driver import EngineUnderTest, expect_same


@case()
def a_running_request_stops(engine: EngineUnderTest) -> None:
    """Once the engine has answered a message that was sent after an abort, the aborted request has no more output."""
    requests = [engine.request(engine.prompt(9, 1), max_tokens=120), engine.request(max_tokens=None)]
    with engine.while_running(lambda: [engine.again(request) for request in requests]) as (mate, victim):
        engine.abort(victim)
        behind = engine.send(engine.request(engine.prompt(3), max_tokens=1))
    engine.finish(mate, behind)
    expect(len(mate.tokens) == 120, f"a request beside the aborted one has {len(mate.tokens)} of 120 tokens")


@case()
def a_waiting_request_never_starts(engine: EngineUnderTest) -> None:
    """A request that is aborted while it waits has no output. Requests after it are served."""
    most = engine.config.scheduler.max_num_seqs
    with engine.while_running(
        lambda: [engine.request(engine.prompt(6, i), max_tokens=120) for i in range(most)]
    ) as running:
        victim, behind = engine.send(engine.request(max_tokens=50)), engine.send(engine.request(max_tokens=3))
        engine.abort(victim)
    engine.finish(*running, behind)
    engine.fence()
    expect(not victim.tokens, "the aborted request has tokens")


@case()
def an_aborted_id_can_be_used_again(engine: EngineUnderTest) -> None:
    """A new request with the id of an aborted one is served like any other."""
    request = engine.request(engine.prompt(10, 2))
    expected = engine.run_one(engine.again(request))
    victim = engine.send(engine.request(engine.prompt(20, 5), max_tokens=None, presence_penalty=1.0))
    engine.await_first_tokens(victim)
    engine.abort(victim)
    engine.fence()
    request.request_id = victim.id
    expect_same([engine.run_one(request)], [expected], "the request under the used id against another id")


@case()
def an_id_of_an_ended_request_can_be_used_again(engine: EngineUnderTest) -> None:
    """A new request with the id of an ended one is served like any other."""
    first = engine.run_one(engine.request(max_tokens=5))
    second = engine.run_one(first.request)
    expect_same([second], [first], "the second request under the id")


@case()
def an_unknown_id_is_harmless(engine: EngineUnderTest) -> None:
    """Aborting unknown ids, ended ids or the same id twice changes nothing."""
    ended = engine.run_one(engine.request(max_tokens=2))
    running = engine.send(engine.request(max_tokens=12))
    engine.core.abort_requests(["nobody", ended.id, ended.id])
    engine.core.abort_requests([])
    engine.finish(running)
    expect(len(running.tokens) == 12, f"a request beside it has {len(running.tokens)} of 12 tokens")


@case()
def all_at_once_are_gone(engine: EngineUnderTest) -> None:
    """After an abort of all running and waiting requests, new requests get the whole engine."""
    most = engine.config.scheduler.max_num_seqs
    victims = [engine.send(engine.request(engine.prompt(12, i), max_tokens=None)) for i in range(2 * most)]
    engine.wait_until(lambda: any(answer.tokens for answer in victims), lambda: "no request has a first token")
    engine.abort(*victims)
    answers = engine.run(*[engine.request(max_tokens=4) for _ in range(most)])
    expect(all(len(answer.tokens) == 4 for answer in answers), "a request after the aborted ones is incomplete")
