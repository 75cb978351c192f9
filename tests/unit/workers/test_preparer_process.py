"""The process that prepares requests: its answers, its limits, and its death."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import msgpack
import pytest
from kombu.asynchronous import Hub
from kombu.serialization import dumps

from headrace_broker.messages import TASK_NAME
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_workers.preparation import preparer_process
from headrace_workers.preparation.preparer_process import PreparerProcess
from unit.engine.letters import load_tokenizer
from unit.workers.fakes import CAPABILITIES, MODEL

pytestmark = pytest.mark.rotated("workers/headrace_workers/preparation")

ENDLESS = (
    "{% if messages[0].content == 'ab' %}{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)
LARGE_TEMPLATE = (
    "{% if messages[0].content == 'ab' %}{{ messages[0].content * 1000000000 }}{% endif %}{{ messages[0].content }}"
)


class Attached:
    """A process in a real event loop, with its answers."""

    def __init__(
        self,
        template: str | None = None,
        *,
        is_quick: bool = False,
        cpu_seconds: float = 20.0,
        capabilities: EngineCapabilities = CAPABILITIES,
    ) -> None:
        self.hub = Hub()
        self.numbers = itertools.count(1)
        self.answers: dict[int, list[Any]] = {}
        self.verdicts: dict[str, str | None] = {}
        self.process = PreparerProcess(
            is_quick=is_quick,
            on_answer=self.answers.__setitem__,
            on_verdict=self.verdicts.__setitem__,
            cpu_seconds=cpu_seconds,
        )
        self.process.start()
        self.process.attach(self.hub)
        self.process.configure(
            {
                "model": "m",
                "trust_remote_code": False,
                "logits_processors": [],
                "served_names": ["tiny"],
                "tokenizer": {**asdict(load_tokenizer(None)), "chat_template": template},
                "model_info": asdict(MODEL),
                "engine": "fake",
                "capabilities": capabilities.to_wire(),
                "is_quick": is_quick,
                "callback_rules": [[], []],
            }
        )

    def submit(self, kwargs: Any, *, body: bytes | None = None) -> int:
        number = next(self.numbers)
        body = body if body is not None else msgpack.packb([[], kwargs, {}])
        self.process.submit(number, ["r", "application/x-msgpack", body, TASK_NAME])
        return number

    def wait(self, *numbers: int) -> list[list[Any]]:
        deadline = time.monotonic() + 300
        while not all(number in self.answers for number in numbers):
            assert time.monotonic() < deadline
            self.hub.run_once()
        return [self.answers[number] for number in numbers]

    def wait_until_ready(self) -> None:
        while not self.process.is_ready:
            self.hub.run_once()

    @property
    def pid(self) -> int:
        assert self.process._process is not None
        return self.process._process.pid


@pytest.fixture
def make_process() -> Iterator[Callable[..., Attached]]:
    made: list[Attached] = []

    def make(*args: Any, **options: Any) -> Attached:
        made.append(Attached(*args, **options))
        return made[-1]

    yield make
    for attached in made:
        attached.process.close()
        attached.hub.close()


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_requests_are_prepared_in_their_order(make_process: Callable[..., Attached]) -> None:
    attached = make_process()
    texts = ["abc", "b", "ca"]
    answers = attached.wait(*[attached.submit({"prompt": text}) for text in texts])
    assert [kind for kind, _ in answers] == ["prepared"] * 3
    assert [len(values["token_ids"]) for _, values in answers] == [3, 1, 2]
    assert list(attached.answers) == [1, 2, 3]


def test_invalid_requests_are_answered(make_process: Callable[..., Attached]) -> None:
    attached = make_process()
    first = attached.submit({"prompt": "abc", "sampling_params": {"n": 0}})
    second = attached.submit(None, body=b"\xc1")
    refused, undecodable = attached.wait(first, second)
    assert refused[:2] == ["refused", "invalid_request"]
    assert undecodable[0] == "undecodable"


def test_a_feature_that_the_engine_lacks_is_refused_by_name(make_process: Callable[..., Attached]) -> None:
    attached = make_process(capabilities=replace(CAPABILITIES, max_logit_bias=1, temperature_range=(0.01, 2.0)))
    asked = [{"logit_bias": {"10": 1}, "temperature": 2}, {"logit_bias": {"10": 1, "11": 1}, "temperature": 3}]
    good, bad = attached.wait(*[attached.submit({"prompt": "abc", "sampling_params": params}) for params in asked])
    assert good[0] == "prepared"
    assert bad[:2] == ["refused", "invalid_request"]
    assert bad[2].split("; ") == [
        "logit_bias has 2 entries, the engine fake takes at most 1",
        "temperature must be 0, or 0.01 to 2, with the engine fake, got 3",
    ]


def test_nothing_but_data_is_ever_decoded(make_process: Callable[..., Attached]) -> None:
    attached = make_process()
    content_type, _, body = dumps([[], {"prompt": "abc"}, {}], "pickle")
    attached.process.submit(7, ["r", content_type, body, TASK_NAME])
    [(kind, problem)] = attached.wait(7)
    assert kind == "undecodable"
    assert problem.startswith("its content-type is application/x-python-serialize; accepted are")


def test_a_chat_template_that_never_ends_is_stopped_and_reported(make_process: Callable[..., Attached]) -> None:
    attached = make_process(ENDLESS, cpu_seconds=1)
    endless, other = attached.submit(chat("ab")), attached.submit(chat("c"))
    refused, prepared = attached.wait(endless, other)
    assert refused == [
        "refused",
        "invalid_request",
        "the request cannot be served: its preparation takes more than 1 s of processor time",
    ]
    assert prepared[0] == "prepared"


def test_a_chat_template_that_exhausts_memory_is_refused(make_process: Callable[..., Attached]) -> None:
    attached = make_process(LARGE_TEMPLATE)
    refused, prepared = attached.wait(attached.submit(chat("ab")), attached.submit(chat("c")))
    assert refused[0] == "refused"
    assert prepared[0] == "prepared"


def test_a_quick_process_answers_slow_for_a_long_request(make_process: Callable[..., Attached]) -> None:
    attached = make_process(ENDLESS, is_quick=True)
    slow, prepared = attached.wait(attached.submit(chat("ab")), attached.submit(chat("c")))
    assert slow == ["slow"]
    assert prepared[0] == "prepared"


def test_a_quick_process_compiles_no_grammar_and_learns_verdicts(make_process: Callable[..., Attached]) -> None:
    kwargs = {"prompt": "a", "sampling_params": {"structured_outputs": {"choice": ["ab"]}}}
    slow, quick = make_process(), make_process(is_quick=True)
    assert quick.wait(quick.submit(kwargs)) == [["slow"]]
    (tried,) = slow.wait(slow.submit(kwargs))
    ((grammar, problem),) = slow.verdicts.items()
    quick.process.learn(grammar, problem)
    (learned,) = quick.wait(quick.submit(kwargs))
    assert learned == tried


def test_a_process_that_is_killed_once_fails_no_request(make_process: Callable[..., Attached]) -> None:
    attached = make_process()
    attached.wait(attached.submit({"prompt": "a"}))
    os.kill(attached.pid, signal.SIGSTOP)
    numbers = [attached.submit({"prompt": "a"}) for _ in range(3)]
    os.kill(attached.pid, signal.SIGKILL)
    assert [kind for kind, _ in attached.wait(*numbers)] == ["prepared"] * 3


def test_a_request_whose_process_dies_twice_is_refused_and_the_others_are_served(
    make_process: Callable[..., Attached],
) -> None:
    attached = make_process(ENDLESS, cpu_seconds=60)
    first, second = attached.submit(chat("ab")), attached.submit(chat("c"))
    for _ in range(2):
        attached.wait_until_ready()
        before = attached.pid
        os.kill(before, signal.SIGKILL)
        while attached.pid == before:
            attached.hub.run_once()
    refused, prepared = attached.wait(first, second)
    assert refused[0] == "refused"
    assert "ended the process twice, with status -9" in refused[2]
    assert prepared[0] == "prepared"


def test_requests_wait_for_a_process_that_dies_at_its_start(
    make_process: Callable[..., Attached], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparer_process, "_RESTART_SECONDS", 0.0)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    attached = make_process()
    numbers = [attached.submit({"prompt": "a"}) for _ in range(2)]
    for _ in range(4):
        while attached.process._process is not None:
            attached.hub.run_once()
        assert attached.process.is_failing
        attached.process.check()
    assert attached.answers == {}
    monkeypatch.undo()
    while attached.process._process is not None:
        attached.hub.run_once()
    attached.process._start_at = 0.0
    attached.process.check()
    assert [kind for kind, _ in attached.wait(*numbers)] == ["prepared"] * 2
    assert not attached.process.is_failing


def test_a_process_that_hangs_at_its_start_is_killed_though_no_request_waits_for_it(
    make_process: Callable[..., Attached], monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = make_process()
    hanging = attached.pid
    os.kill(hanging, signal.SIGSTOP)
    monkeypatch.setattr(preparer_process, "START_SECONDS", 0.0)
    attached.process.check()
    assert attached.process.is_failing
    assert attached.pid != hanging
    monkeypatch.undo()
    attached.wait_until_ready()
    assert not attached.process.is_failing


def test_a_process_that_hangs_is_killed(make_process: Callable[..., Attached], monkeypatch: pytest.MonkeyPatch) -> None:
    attached = make_process()
    attached.wait(attached.submit({"prompt": "a"}))
    os.kill(attached.pid, signal.SIGSTOP)
    first, second = attached.submit({"prompt": "a"}), attached.submit({"prompt": "b"})
    monkeypatch.setattr(preparer_process, "WAIT_SECONDS", 0.0)
    attached.process.check()
    monkeypatch.undo()
    refused, prepared = attached.wait(first, second)
    assert "was not complete after" in refused[2]
    assert prepared[0] == "prepared"


def test_a_process_that_dies_idle_is_restarted(
    make_process: Callable[..., Attached], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparer_process, "_RESTART_SECONDS", 0.0)
    attached = make_process()
    attached.wait(attached.submit({"prompt": "a"}))
    os.kill(attached.pid, signal.SIGKILL)
    while attached.process._process is not None:
        attached.hub.run_once()
    number = attached.submit({"prompt": "a"})
    attached.process.check()
    assert attached.wait(number)[0][0] == "prepared"


def test_a_body_larger_than_the_pipe_does_not_block_the_loop(make_process: Callable[..., Attached]) -> None:
    attached = make_process()
    attached.wait(attached.submit({"prompt": "a"}))
    os.kill(attached.pid, signal.SIGSTOP)
    large = attached.submit({"prompt": "a", "x": "y" * (8 << 20)})  # would block for ever if it blocked
    small = attached.submit({"prompt": "b"})
    os.kill(attached.pid, signal.SIGCONT)
    refused, prepared = attached.wait(large, small)
    assert refused[:2] == ["refused", "invalid_request"]
    assert prepared[0] == "prepared"
