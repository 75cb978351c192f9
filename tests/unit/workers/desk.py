"""`Desk`: a dispatcher with fakes of its environment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace_engine.core.outputs import EngineCoreOutput
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.logits_processor import load_logits_processors
from headrace_engine.requests.request import FinishReason
from headrace_monitoring.health import WorkerHealth
from headrace_monitoring.metrics import Metrics
from headrace_workers.engine_link.adapters import Adapters
from headrace_workers.preparation.preparer import GrammarCachingProcessor, Preparer
from headrace_workers.preparation.preparer_process import Answer, Verdict
from headrace_workers.requests.dispatcher import Dispatcher
from headrace_workers.requests.preemption import Preemption
from headrace_workers.requests.service_state import ServedModel
from unit.monitoring.scrape import Scrape
from unit.workers.fakes import (
    CAPABILITIES,
    MODEL,
    FakeCeleryRequest,
    FakeHub,
    FakeRedis,
    FakeSupervisor,
    FakeTokenizer,
    step,
)


class InlineProcess:
    """Prepares each request in this process, at once or when the test calls `answer`."""

    def __init__(self, *, on_answer: Answer, on_verdict: Verdict) -> None:
        self.is_held = False
        self.is_failing, self.is_ready = False, True
        self.submitted: dict[int, list[Any]] = {}
        self.learned: dict[str, str | None] = {}
        self.on_answer = on_answer
        self.on_verdict = on_verdict
        self.is_closed = False

    def start(self) -> None: ...

    def attach(self, hub: Any) -> None: ...

    def check(self) -> None: ...

    def configure(self, settings: dict[str, Any]) -> None:
        tokenizer: Any = FakeTokenizer()
        processor = GrammarCachingProcessor(
            MODEL,
            tokenizer,
            logits_processors=load_logits_processors(settings["logits_processors"]),
            engine=settings["engine"],
            capabilities=EngineCapabilities.from_wire(settings["capabilities"]),
            is_quick=settings["is_quick"],
            tell=lambda grammar, problem: self.on_verdict(grammar, problem),
        )
        self.preparer = Preparer(
            processor, tokenizer, settings["served_names"], is_quick=settings["is_quick"], cpu_seconds=60
        )

    def submit(self, number: int, values: list[Any]) -> None:
        self.submitted[number] = values
        if not self.is_held:
            self.answer()

    def answer(self, *answer: Any) -> None:
        """Answer the first request; with this answer, if one is given."""
        number = next(iter(self.submitted))
        values = self.submitted.pop(number)
        work = self.preparer.answer if number > 0 else self.preparer.answer_call
        self.on_answer(number, list(answer) or work(*values))

    def learn(self, grammar: str, problem: str | None) -> None:
        self.learned[grammar] = problem

    def close(self) -> None:
        self.is_closed = True


class Desk:
    """A dispatcher with fakes of its environment."""

    def __init__(
        self,
        max_num_seqs: int = 4,
        logits_processors: Sequence[str] = (),
        publish_interval: float = 0.0,
        max_preemptions: int = 3,
        share_prefix_cache: bool = False,
        adapters: Adapters | None = None,
        engine: str = "fake",
        capabilities: EngineCapabilities = CAPABILITIES,
        *,
        fetch_quantum: int | None = None,
        prepares_plain_requests: bool = False,
    ) -> None:
        processes: dict[bool, InlineProcess] = {}

        def make_process(*, is_quick: bool, on_answer: Answer, on_verdict: Verdict) -> InlineProcess:
            return processes.setdefault(is_quick, InlineProcess(on_answer=on_answer, on_verdict=on_verdict))

        self.redis = FakeRedis()
        self.hub = FakeHub()
        self.engine = FakeSupervisor()
        self.metrics = Metrics(model="tiny", queue="headrace.tiny")
        self.results: dict[str, dict[str, Any]] = {}
        self.given_up: list[str] = []
        self.dispatcher = Dispatcher(
            ServedModel(
                names=["tiny"],
                adapters=adapters or Adapters({}),
                max_num_seqs=max_num_seqs,
                fetch_quantum=fetch_quantum or max_num_seqs,
                max_delay_seconds=3600,
                preparation_settings={"logits_processors": list(logits_processors)},
                engine=engine,
                share_prefix_cache=share_prefix_cache,
            ),
            client=self.redis,  # type: ignore[arg-type]
            stream_ttl_seconds=60,
            worker_name="w",
            supervise=lambda _events: self.engine,  # type: ignore[arg-type, return-value]
            make_process=make_process,
            metrics=self.metrics,
            health=WorkerHealth(),
            store_result=lambda request_id, result, _: self.results.__setitem__(request_id, result),
            on_refused=lambda _reason: None,
            on_given_up=self.given_up.append,
            preemption=Preemption(max_preemptions, max_num_seqs, self.metrics),
            publish_interval=publish_interval,
        )
        self.quick, self.slow = processes[True], processes[False]
        self.admission, self.watch = self.dispatcher.admission, self.dispatcher.engine
        self.in_flight = self.watch.in_flight
        self.dispatcher.attach(self.hub)
        self.watch.on_engine_ready(MODEL, capabilities)
        self.plain = self.admission.preparation._plain
        if not prepares_plain_requests:  # then all go through the processes, where a test can hold them
            self.admission.preparation._plain = None

    def accept(self, request: FakeCeleryRequest) -> FakeCeleryRequest:
        request.results = self.results
        self.admission.accept(request)
        return request

    def generate(self, *token_ids: int, finish: FinishReason | None = None, waiting: int = 0) -> None:
        """Run one step that generates one token for each sent request."""
        outputs = [
            EngineCoreOutput(request_id=request.request_id, new_token_ids=[token_id], finish_reason=finish)
            for request, token_id in zip(self.engine.sent, token_ids, strict=True)
        ]
        self.watch.on_engine_outputs(step(*outputs, waiting=waiting))

    def settle(self) -> None:
        """Wait until the finisher's thread is idle."""
        deadline = time.monotonic() + 60
        while self.dispatcher.settlement._finisher.busy:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.hub.run_soon()

    def wait_soon(self) -> None:
        """Wait until another thread has scheduled a call on the event loop, and run it."""
        deadline = time.monotonic() + 60
        while not self.hub.soon:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.hub.run_soon()

    def assert_idle(self) -> None:
        self.settle()
        assert self.dispatcher.is_idle
        assert self.admission.free_slots() == 4
        assert self.value("headrace_requests_in_flight") == 0
        assert len(self.in_flight._outputs) == 0
        assert self.hub.pending() == []

    def value(self, name: str, **labels: str) -> float:
        return Scrape(self.metrics).value(name, **labels)

    def text(self, request_id: str) -> str:
        return "".join(data["text"] for _, _, kind, data in self.redis.entries(request_id) if kind == "chunk")
