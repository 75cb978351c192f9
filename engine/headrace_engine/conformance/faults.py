"""Stops, signals and ends of the engine's process and of its parent."""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from headrace_engine.conformance.case import Broken, Stage, case, case_for_each, expect
from headrace_engine.conformance.driver import EngineUnderTest, expect_same
from headrace_engine.conformance.launcher import Launcher
from headrace_engine.errors import ConfigError, EngineDeadError, HeadraceEngineError, ModelLoadError

_SILENCE_SECONDS = 1.0


@case()
def a_stopped_process_loses_nothing(engine: EngineUnderTest) -> None:
    """After SIGSTOP and SIGCONT no output is lost, repeated or changed."""
    requests = [engine.request(engine.prompt(12, i), max_tokens=40) for i in range(3)]
    expected = engine.run(*[engine.again(request) for request in requests])
    answers = [engine.send(request) for request in requests]
    engine.await_first_tokens(*answers)
    with engine.stopped():
        late = engine.send(engine.request(max_tokens=3))  # sent to a stopped process
        deadline = time.monotonic() + _SILENCE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            engine.take(left)
    engine.finish(*answers, late)
    expect_same(answers, expected, "with a stop against without")


@case()
def signals_of_the_terminal_are_the_parents(engine: EngineUnderTest) -> None:
    """SIGINT, SIGTERM and SIGHUP do not end the engine. Only its parent ends it."""
    answer = engine.send(engine.request(max_tokens=30))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(engine.core.pid, number)
    engine.finish(answer)
    expect(len(answer.tokens) == 30, f"the request has {len(answer.tokens)} of 30 tokens")
    engine.fence()


@case()
def the_engine_leads_a_process_group(engine: EngineUnderTest) -> None:
    """The engine's process leads its own process group, so that Ctrl-C reaches only its parent."""
    group = os.getpgid(engine.core.pid)
    expect(group == engine.core.pid, f"process {engine.core.pid} is in the process group {group}")


@case(stage=Stage.PLAIN_END)
def shutdown_ends_in_time(engine: EngineUnderTest) -> None:
    """The frame stop ends the engine and its process group in time, even while requests run."""
    answer = engine.send(engine.request(max_tokens=None))
    engine.await_first_tokens(answer)
    pid, started = engine.core.pid, time.monotonic()
    engine.core.shutdown(timeout=engine.end_patience)
    took = time.monotonic() - started
    expect(took < engine.end_patience, f"the engine runs on {took:.0f} s after stop")
    _expect_gone(pid, engine.end_patience)


@case(stage=Stage.TIGHT_END)
def a_killed_process_is_a_dead_engine(engine: EngineUnderTest) -> None:
    """After kill -9 the error is an EngineDeadError with its cause. After kill(), the process group is gone."""
    answer = engine.send(engine.request(max_tokens=None))
    engine.await_first_tokens(answer)
    pid = engine.core.pid
    os.kill(pid, signal.SIGKILL)
    try:
        engine.finish(answer)
    except EngineDeadError as error:
        expect("SIGKILL" in str(error), f"the error does not say what ended the engine: {error}")
        expect(error.cause == "crash", f"the cause is {error.cause}, expected crash: the kernel did not kill it")
    else:
        raise Broken("the request ended although the engine was killed")
    engine.core.kill()
    _expect_gone(pid, engine.end_patience)


@case(stage=Stage.NONE)
def the_parents_end_ends_it(launcher: Launcher) -> None:
    """When the parent is killed, the engine and its process group end."""
    parent = subprocess.Popen(
        [sys.executable, "-m", "headrace_engine.conformance.parent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin is not None and parent.stdout is not None
    try:
        parent.stdin.write(json.dumps(launcher.config().to_wire()).encode() + b"\n")
        parent.stdin.flush()
        ready = select.select([parent.stdout], [], [], launcher.start_patience)[0]
        line = parent.stdout.readline() if ready else b""
        expect(line.strip().isdigit(), "the engine does not start under another parent")
    finally:
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()
    _expect_gone(int(line), launcher.end_patience)


_WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    "max_model_len": {"max_model_len": 1 << 40},
    "model": {"model": "/nonexistent/model"},
    "engine_args": {"engine_args": {"no_such_option": 1}},
}


@case_for_each(tuple(_WRONG_OPTIONS), lambda _: (), stage=Stage.NONE)
def a_wrong_option_keeps_it_from_starting(launcher: Launcher, name: str) -> None:
    """{}: a wrong value raises a ConfigError that names it. A wrong model may raise a ModelLoadError."""
    value = next(iter(_WRONG_OPTIONS[name].values()))
    words = next(iter(value)) if isinstance(value, dict) else str(value)
    logging.disable(logging.CRITICAL)  # the engine may log the error that is expected
    try:
        launcher.start(**_WRONG_OPTIONS[name]).close()
    except (ConfigError, ModelLoadError) as error:
        expect(name != "engine_args" or isinstance(error, ConfigError), f"{type(error).__name__}: {error}")
        expect(name in str(error) or words in str(error), f"the error does not name {name}: {error}")
    except (HeadraceEngineError, TimeoutError) as error:
        raise Broken(f"{type(error).__name__} instead of ConfigError: {error}") from error
    else:
        raise Broken(f"the engine starts with {name}={value}")
    finally:
        logging.disable(logging.NOTSET)


def _expect_gone(group: int, seconds: float) -> None:
    """Wait until no process of a group lives. Otherwise kill them, and fail the case."""
    deadline = time.monotonic() + seconds
    while left := _living(group):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            raise Broken(f"processes {left} of the engine's group live on {seconds:g} s later")
        time.sleep(0.05)


def _living(group: int) -> list[int]:
    """Return the running processes of a group. A zombie does not count."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = status.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # the process ended during the check
        if int(process_group) == group and state not in ("Z", "X"):
            found.append(int(status.parent.name))
    return found
