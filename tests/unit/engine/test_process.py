"""The core in a real child process: what passes the pipe, and every way in which a child can end."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.errors import ConfigError, EngineDeadError, HeadraceEngineError, LoRAError, ModelLoadError
from headrace_engine.options.config import LoRAConfig
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.request import FinishReason
from unit.engine.fake_runner import VOCAB_SIZE, fake_config, tokens_alone
from unit.engine.letters import load_tokenizer
from unit.engine.requests import core_request

Start = Callable[..., EngineCoreProcess]


@pytest.fixture
def start(tests_on_path: None) -> Iterator[Start]:
    """Starts children that can import the fake runner; all are gone afterwards."""
    children: list[EngineCoreProcess] = []

    def start_child(**options: Any) -> EngineCoreProcess:
        children.append(EngineCoreProcess(fake_config(**options)))
        return children[-1]

    yield start_child
    for child in children:
        child.kill()
        child.close()


def collect(core: EngineCoreProcess, count: int) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
    """Read until `count` requests have ended."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    while len(ends) < count:
        outputs = core.get_outputs()
        assert outputs is not None
        for news in outputs.outputs:
            tokens.setdefault(news.request_id, []).extend(news.new_token_ids)
            if news.finish_reason is not None:
                ends[news.request_id] = news.finish_reason
    return tokens, ends


def test_a_child_serves_requests_and_ends_when_told(start: Start) -> None:
    core = start()
    assert core.wait_ready(20).vocab_size == VOCAB_SIZE
    messages = [
        core_request(str(i), range(i, i + 9), seed=i, max_tokens=6, stop_token_ids=[40], logprobs=None)
        for i in range(5)
    ]
    for message in messages:
        core.add_request(message)
    tokens, _ = collect(core, 5)
    assert tokens == {message.request_id: tokens_alone(message) for message in messages}
    core.shutdown()
    assert core._process.poll() == 0
    outputs = core.get_outputs()
    while outputs is not None:  # the step that told the runner of the last removals
        assert not outputs.outputs
        outputs = core.get_outputs()


def test_a_killed_child_is_a_dead_engine_that_says_by_what(start: Start) -> None:
    core = start()
    core.wait_ready(20)
    os.kill(core.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=f"engine process {core.pid} ended, killed by SIGKILL") as failure:
        core.get_outputs()
    assert failure.value.cause == "crash"  # the kernel did not kill it for memory
    with pytest.raises(EngineDeadError):
        core.add_request(core_request())
    core.shutdown()  # harmless


def test_a_child_that_exits_while_loading_is_a_dead_engine(start: Start) -> None:
    with pytest.raises(EngineDeadError, match="exit status 3"):
        start(model="dies").wait_ready(20)


def test_a_child_says_why_its_model_cannot_be_loaded(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelLoadError, match="model 'missing' cannot be read"):
        start(model="missing").wait_ready(20)


def test_a_child_says_which_option_does_not_fit(start: Start) -> None:
    with pytest.raises(ConfigError, match="num_blocks gives 3"):
        start(num_blocks=3).wait_ready(20)


@pytest.mark.parametrize(
    ("runner", "error", "cause"),
    [("fails", "RuntimeError", "crash"), ("recompiles", "RecompilationError", "recompilation")],
)
def test_a_child_whose_runner_fails_says_so_and_ends(start: Start, runner: str, error: str, cause: str) -> None:
    core = start(model=runner)
    core.wait_ready(20)
    core.add_request(core_request("a", [13]))
    with pytest.raises(EngineDeadError, match=f"{error}: the fake device failed") as failure:
        core.get_outputs()
    assert failure.value.cause == cause


def test_what_a_failing_runner_says_is_in_the_error_and_in_no_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    core = start(model="fails")
    core.wait_ready(20)
    core.add_request(core_request("a", [13, 57, 91]))
    with caplog.at_level(logging.INFO), pytest.raises(EngineDeadError, match=r"failed on \[13, 57, 91\]") as raised:
        core.get_outputs()
    assert any(line.startswith("the runner failed on a step of 1 requests") for line in caplog.messages)
    assert "in _update" in caplog.text
    assert "RuntimeError" in caplog.text
    assert "13, 57, 91" not in caplog.text
    assert raised.value.summary == f"the engine process {core.pid} failed with RuntimeError"


def test_what_a_child_computed_before_it_failed_is_not_lost(start: Start) -> None:
    core = start(model="fails")
    core.wait_ready(20)
    good = core_request("good", [1, 2], max_tokens=1)
    core.add_request(good)
    assert select.select([core.fileno()], [], [], 20)[0]
    core.add_request(core_request("bad", [13]))
    core._process.wait(20)  # both outputs are in the pipe now
    tokens, _ = collect(core, 1)
    assert tokens == {"good": tokens_alone(good)}
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="RuntimeError: the fake device failed"):
            collect(core, 1)


def test_waiting_for_a_child_that_is_not_ready_ends_with_a_timeout(start: Start) -> None:
    with pytest.raises(TimeoutError, match="not ready after 0 s"):
        start().wait_ready(0)


def test_a_refused_request_is_answered_and_the_child_lives_on(start: Start) -> None:
    core = start(max_num_queued_requests=1)
    core.wait_ready(20)
    core.add_request(core_request("wrong", []))
    _, ends = collect(core, 1)
    assert ends == {"wrong": FinishReason.ERROR}
    core.add_request(core_request("right", max_tokens=2))
    assert collect(core, 1)[0] == {"right": tokens_alone(core_request(max_tokens=2))}


def test_an_aborted_request_stops_and_others_go_on(start: Start) -> None:
    core = start(model="long", num_blocks=40)
    core.wait_ready(20)
    core.add_request(core_request("endless", [1], max_tokens=None, ignore_eos=True))
    outputs = core.get_outputs()
    assert outputs is not None and outputs.stats.running == 1
    core.abort_requests(["endless"])
    core.add_request(core_request("short", [2], max_tokens=2))
    while outputs is not None and not any(news.request_id == "short" for news in outputs.outputs):
        outputs = core.get_outputs()
    assert outputs is not None and outputs.stats.running == 1


def test_an_event_loop_can_watch_the_child(start: Start) -> None:
    core = start()
    while not core.is_ready:
        assert select.select([core.fileno()], [], [], 20)[0]
        core.receive()
    core.add_request(core_request("a", max_tokens=1))
    assert select.select([core.fileno()], [], [], 20)[0]
    step = core.receive()[0]
    assert step.outputs[0].finish_reason is FinishReason.LENGTH


def test_frames_larger_than_any_pipe_do_not_deadlock(start: Start) -> None:
    # The parent sends prompts of megabytes while nobody reads what the child has to say.
    core = start(model="long", num_blocks=40, max_num_batched_tokens=1 << 20)
    core.wait_ready(20)
    for index in range(300):
        core.add_request(core_request(f"chatty {index} {'x' * 2000}", [index], max_tokens=4, ignore_eos=True))
    prompt = [1000] * 60_000
    sender = threading.Thread(
        target=lambda: [core.add_request(core_request(f"big {i}", prompt, max_tokens=1)) for i in range(4)]
    )
    sender.start()
    sender.join(30)
    assert not sender.is_alive()
    _, ends = collect(core, 304)
    assert set(ends.values()) == {FinishReason.LENGTH}


def test_nobody_waits_for_a_child_that_reads_nothing(start: Start) -> None:
    core = start(num_blocks=64)
    core.wait_ready()
    os.kill(core.pid, signal.SIGSTOP)  # a child that loads a large vocabulary reads nothing for as long as that takes
    bias = dict.fromkeys(range(VOCAB_SIZE), 1.5)
    requests = [core_request(f"r{number}", [1, 2, 3], max_tokens=2, logit_bias=bias) for number in range(2000)]
    adding = threading.Thread(target=lambda: [core.add_request(request) for request in requests], daemon=True)
    adding.start()
    adding.join(60)
    assert not adding.is_alive()
    os.kill(core.pid, signal.SIGCONT)
    tokens, _ = collect(core, len(requests))
    assert set(tokens) == {request.request_id for request in requests}


def test_a_ctrl_c_in_the_terminal_is_the_parents_business(start: Start) -> None:
    core = start()
    core.wait_ready(20)
    assert os.getpgid(core.pid) == core.pid != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(core.pid, number)
    core.add_request(core_request("a", max_tokens=1))
    assert collect(core, 1)[1] == {"a": FinishReason.LENGTH}


def test_a_child_answers_calls_while_it_computes_and_while_it_is_idle(start: Start) -> None:
    core = start(model="long", num_blocks=40, lora=LoRAConfig(max_cpu_loras=2))
    core.wait_ready(20)
    sql = LoRARequest("sql", 7, "/sql")
    for _ in ("idle", "busy"):
        answers = [core.call("add_lora", sql.to_wire()), core.call("list_loras"), core.call("remove_lora", 7)]
        for answer in answers:
            core.wait(answer)
        assert [answer.result() for answer in answers] == [True, [7], True]
        core.add_request(core_request("endless", [1], max_tokens=None, ignore_eos=True))
        assert core.get_outputs() is not None


def test_a_child_refuses_a_call_with_every_reason_and_lives_on(start: Start) -> None:
    core = start(lora=LoRAConfig())
    core.wait_ready(20)
    broken = core.call("add_lora", LoRARequest("x", 1, "broken").to_wire())
    core.wait(broken)
    with pytest.raises(LoRAError) as refused:
        broken.result()
    assert refused.value.problems == ["LoRA adapter 'x': it is broken", "in two ways"]
    bug = core.call("add_lora", LoRARequest("x", 1, "bug").to_wire())
    core.wait(bug)
    with pytest.raises(HeadraceEngineError, match="RuntimeError: the fake loader failed"):
        bug.result()
    message = core_request("a", max_tokens=2, lora="fine")
    core.add_request(message)
    assert collect(core, 1)[0] == {"a": tokens_alone(message)}


def test_a_child_gives_its_tokenizer_or_says_why_it_has_none(start: Start) -> None:
    core = start()
    parts = core.call("tokenizer")
    core.wait(parts)
    assert parts.result() == asdict(load_tokenizer(None))
    core = start(tokenizer="unit.engine.letters:runes")
    refused = core.call("tokenizer")
    core.wait(refused)
    with pytest.raises(ConfigError, match="runes' cannot be imported"):
        refused.result()


def test_calls_to_a_dead_child_fail_as_it_did(start: Start) -> None:
    core = start(lora=LoRAConfig())
    core.wait_ready(20)
    os.kill(core.pid, signal.SIGSTOP)
    pending = core.call("list_loras")
    os.kill(core.pid, signal.SIGKILL)
    core.wait(pending)
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        pending.result()
    with pytest.raises(EngineDeadError):
        core.call("list_loras").result()


def test_closing_gives_the_pipes_back(start: Start) -> None:
    core = start()
    core.wait_ready(20)
    descriptor = core.fileno()
    core.kill()
    core.close()
    core.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_child_whose_parent_goes_away_ends(start: Start) -> None:
    core = start()
    core.wait_ready(20)
    core.close()  # the parent's ends of both pipes are all that the child can see of it
    core._process.wait(20)
    assert core._process.poll() == 0
