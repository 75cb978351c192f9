"""The engine's supervisor: start, death, back-off and giving up."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import pytest

from headrace_engine.core.outputs import EngineCoreOutputs
from headrace_engine.errors import ConfigError, EngineDeadError, ModelLoadError
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.runner.contracts import ModelInfo
from headrace_workers.engine_link.supervisor import RESTART_LIMIT, EngineSupervisor
from unit.engine.letters import encode, load_tokenizer
from unit.workers.fakes import FakeHub, FakeProcess, step

CONFIG = EngineArgs(model="tiny").create_engine_config()


class Events:
    """Records the engine's events, and raises `error` if it is set."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.causes: list[str] = []
        self.reasons: list[str] = []
        self.error: Exception | None = None

    def on_engine_loading(self, share: float) -> None:
        if share:
            self.told.append(f"loading {share}")

    def on_engine_ready(self, model_info: ModelInfo, capabilities: EngineCapabilities) -> None:
        self.told.append("ready")
        if self.error:
            raise self.error

    def on_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        self.told.append("outputs")
        if self.error:
            raise self.error

    def on_engine_lost(self, reason: str, cause: str, *, was_ready: bool) -> None:
        self.told.append("lost" if was_ready else "lost while loading")
        self.causes.append(cause)
        self.reasons.append(reason)

    def on_engine_given_up(self, reason: str) -> None:
        self.told.append(f"given up: {reason}")


class Engine:
    """A supervisor with fake processes."""

    def __init__(self, answer: Future[Any] | None = None) -> None:
        self.now = 100.0
        self.answer = answer
        self.hub = FakeHub()
        self.events = Events()
        self.processes: list[FakeProcess] = []
        self.spawn_error: Exception | None = None
        self.supervisor = EngineSupervisor(
            CONFIG,
            self.events,
            spawn=self._spawn,  # type: ignore[arg-type]
            stall_seconds=10,
            clock=lambda: self.now,
        )
        self.supervisor.attach(self.hub)
        self.supervisor.start()

    def _spawn(self, _: Any) -> FakeProcess:
        if self.spawn_error:
            raise self.spawn_error
        self.processes.append(FakeProcess())
        if self.answer is not None:
            self.process.answer = self.answer
        return self.processes[-1]

    @property
    def process(self) -> FakeProcess:
        return self.processes[-1]

    def readable(self) -> None:
        self.hub.readers[self.process.fileno()]()

    def ready(self) -> None:
        self.process.is_ready = True
        self.readable()

    def die(self, error: Exception | None = None) -> None:
        self.process.outbox.append(error or EngineDeadError("killed by SIGKILL"))
        self.readable()


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_an_engine_is_ready_once_and_its_steps_are_passed_on(engine: Engine) -> None:
    assert not engine.supervisor.is_ready
    engine.ready()
    engine.process.outbox.append(step())
    engine.readable()
    assert engine.supervisor.is_ready
    assert engine.events.told == ["ready", "outputs"]


def test_a_new_connection_renews_the_restart_timer(engine: Engine) -> None:
    engine.ready()
    engine.die()
    for timer in engine.hub.timers:
        timer.cancel()  # as Celery does with timers that were set while it tried to connect
    engine.now += 0.2
    for _ in range(2):
        engine.supervisor.attach(engine.hub)
    assert engine.hub.pending() == [pytest.approx(0.3)]
    engine.hub.advance()
    engine.ready()
    assert len(engine.processes) == 2
    engine.supervisor.attach(engine.hub)
    assert engine.hub.pending() == []


def test_a_dead_engine_is_reaped_and_replaced_after_a_pause(engine: Engine) -> None:
    engine.ready()
    engine.die()
    assert engine.events.told == ["ready", "lost"]
    assert engine.process.calls == ["kill", "close"]
    assert not engine.supervisor.is_ready
    assert engine.hub.readers == {}
    assert engine.hub.pending() == [0.5]
    engine.hub.advance()
    engine.ready()
    assert engine.events.told == ["ready", "lost", "ready"]
    assert len(engine.processes) == 2


def test_an_engine_is_ready_once_its_tokenizer_is_read_and_later_ones_are_not_asked() -> None:
    engine = Engine(Future())
    engine.ready()
    assert not engine.supervisor.is_ready
    assert engine.answer is not None
    engine.answer.set_result(asdict(load_tokenizer(None)))
    engine.readable()
    assert engine.supervisor.is_ready
    assert engine.supervisor.tokenizer.encode("ab") == encode("ab")
    engine.die()
    engine.hub.advance()
    engine.ready()
    assert engine.events.told == ["ready", "lost", "ready"]
    assert [process.asked for process in engine.processes] == [["tokenizer"], []]


def test_the_next_engine_is_asked_for_the_tokenizer_that_a_dead_one_did_not_give() -> None:
    engine = Engine(Future())
    engine.die()
    engine.answer = None
    engine.hub.advance()
    engine.ready()
    assert engine.events.told == ["lost while loading", "ready"]


def test_the_worker_gives_up_on_a_model_without_a_usable_tokenizer() -> None:
    engine = Engine(Future())
    assert engine.answer is not None
    engine.answer.set_exception(ModelLoadError("no tokenizer"))
    engine.ready()
    assert engine.events.told == ["given up: no tokenizer"]
    assert engine.process.calls == ["kill", "close"]


def test_pauses_double_and_the_worker_gives_up_at_the_limit(engine: Engine) -> None:
    pauses = []
    for _ in range(RESTART_LIMIT - 1):
        engine.die()
        pauses += engine.hub.pending()
        engine.hub.advance()
    engine.die()
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    assert engine.events.told[:-1] == ["lost while loading"] * RESTART_LIMIT
    assert engine.events.told[-1] == (f"given up: the engine died {RESTART_LIMIT} times in a row: killed by SIGKILL")
    assert engine.hub.pending() == []


def test_a_step_resets_the_deaths_in_a_row(engine: Engine) -> None:
    for _ in range(3 * RESTART_LIMIT):
        engine.ready()
        engine.process.outbox.append(step())
        engine.readable()
        engine.die()
        engine.hub.advance()
    assert engine.events.told.count("lost") == 3 * RESTART_LIMIT
    assert not any("given up" in told for told in engine.events.told)


@pytest.mark.parametrize("error", [ModelLoadError("no such model"), ConfigError("too little memory")])
def test_an_error_that_retries_cannot_fix_is_not_retried(engine: Engine, error: Exception) -> None:
    engine.die(error)
    assert engine.events.told == [f"given up: {error}"]
    assert engine.hub.pending() == []
    assert engine.process.calls == ["kill", "close"]


def test_a_process_that_cannot_be_started_counts_as_a_death(engine: Engine) -> None:
    engine.ready()
    engine.die()
    engine.spawn_error = OSError("no memory")
    for _ in range(RESTART_LIMIT - 1):
        engine.hub.advance()
    assert engine.events.told[-1].startswith(f"given up: the engine died {RESTART_LIMIT} times in a row")
    assert "no memory" in engine.events.told[-1]


def test_the_worker_gives_up_on_an_engine_that_is_no_longer_installed(engine: Engine) -> None:
    engine.ready()
    engine.die()
    engine.spawn_error = ConfigError("engine is 'gone'")
    engine.hub.advance()
    assert engine.events.told[-1] == "given up: engine is 'gone'"
    assert engine.hub.pending() == []


@pytest.mark.parametrize("error", [KeyError("r1"), ModelLoadError("no tokenizer")])
def test_an_error_in_handling_outputs_never_reaches_the_event_loop(engine: Engine, error: Exception) -> None:
    """kombu treats a KeyError as a lost connection. Tokens would be missing from streams afterwards."""
    engine.events.error = error
    engine.ready()
    assert engine.events.told[-1].startswith("given up: ")
    assert not engine.supervisor.is_ready
    assert engine.process.calls == ["kill", "close"]


def test_requests_for_an_engine_that_is_not_ready_wait_until_it_is(engine: Engine) -> None:
    request: Any = object()
    engine.supervisor.send([request])
    engine.supervisor.abort(["r1"])
    assert engine.process.requests == []
    engine.ready()
    engine.supervisor.send([request])
    assert engine.process.requests == [request]
    engine.die()
    engine.supervisor.send([request])
    engine.supervisor.abort(["r1"])


def test_sending_to_a_dying_engine_raises_nothing(engine: Engine) -> None:
    engine.ready()
    engine.process.send_error = EngineDeadError("gone")
    request: Any = object()
    engine.supervisor.send([request])
    engine.supervisor.abort(["r1"])
    assert engine.events.told == ["ready"]


def test_a_new_event_loop_reads_from_the_running_engine(engine: Engine) -> None:
    engine.ready()
    other = FakeHub()
    engine.supervisor.attach(other)
    engine.process.outbox.append(step())
    other.readers[engine.process.fileno()]()
    assert engine.events.told == ["ready", "outputs"]


def test_a_loading_engine_tells_its_share_of_the_weights_until_it_is_ready(engine: Engine) -> None:
    for share in (0.25, 0.75):
        engine.process.load_progress = share
        engine.process.speak()
        engine.hub.readers[engine.process.fileno()]()
    engine.ready()
    assert engine.events.told == ["loading 0.25", "loading 0.75", "ready"]


def test_stopping_shuts_a_ready_engine_down_and_kills_a_loading_one(engine: Engine) -> None:
    loading = Engine()
    loading.supervisor.stop()
    assert loading.process.calls == ["kill", "close"]
    engine.ready()
    engine.supervisor.stop()
    assert engine.process.calls == ["shutdown", "close"]
    assert engine.hub.readers == {}
    engine.supervisor.stop()
    assert engine.process.calls == ["shutdown", "close"]


def test_a_stopped_supervisor_starts_nothing_more(engine: Engine) -> None:
    engine.ready()
    engine.die()
    engine.supervisor.stop()
    engine.hub.advance()
    assert len(engine.processes) == 1


def test_an_engine_that_has_work_and_sends_nothing_is_killed_and_replaced(engine: Engine) -> None:
    engine.ready()
    engine.supervisor.check_progress(has_work=True)
    engine.now += 9
    engine.supervisor.check_progress(has_work=True)
    assert engine.events.told == ["ready"]
    engine.now += 2
    engine.supervisor.check_progress(has_work=True)
    assert engine.events.told == ["ready", "lost"]
    assert engine.events.causes == ["stall"]
    assert engine.process.calls == ["kill", "close"]
    engine.hub.advance()
    engine.ready()
    engine.now += 9
    engine.supervisor.check_progress(has_work=True)
    assert engine.events.told == ["ready", "lost", "ready"]


def test_neither_an_idle_nor_a_loading_nor_a_stepping_engine_has_stalled(engine: Engine) -> None:
    for _ in range(3):
        engine.now += 100
        engine.supervisor.check_progress(has_work=True)
    engine.ready()
    for _ in range(3):
        engine.now += 100
        engine.supervisor.check_progress(has_work=False)
    for _ in range(3):
        engine.now += 9
        engine.process.outbox.append(step())
        engine.readable()
        engine.supervisor.check_progress(has_work=True)
    assert "lost" not in engine.events.told


def test_a_worker_that_was_stopped_itself_reads_outputs_before_it_kills_the_engine(engine: Engine) -> None:
    engine.ready()
    engine.supervisor.check_progress(has_work=True)
    engine.now += 100
    engine.process.outbox.append(step())
    engine.process.speak()
    engine.supervisor.check_progress(has_work=True)
    assert engine.events.told == ["ready", "outputs"]


@pytest.mark.parametrize("cause", ["crash", "out_of_memory", "recompilation"])
def test_the_cause_of_a_death_is_reported(engine: Engine, cause: Any) -> None:
    engine.ready()
    engine.die(EngineDeadError("gone", cause=cause))
    assert engine.events.causes == [cause]


def test_a_runners_error_text_stays_out_of_log_and_reason(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.ready()
    with caplog.at_level("INFO"):
        engine.die(EngineDeadError("RuntimeError: no token Zanzibar", summary="it failed with RuntimeError"))
    assert "engine lost (1 in a row): it failed with RuntimeError" in caplog.text
    assert "Zanzibar" not in caplog.text
    assert engine.events.reasons == ["it failed with RuntimeError"]


def test_deaths_that_are_reset_do_not_add_up(engine: Engine) -> None:
    for _ in range(2 * RESTART_LIMIT):
        engine.die()
        engine.supervisor.reset_deaths()
        engine.hub.advance()
    assert not any("given up" in told for told in engine.events.told)
