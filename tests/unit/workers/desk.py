"""`Desk`: a dispatcher among stand-ins, for the tests of what it does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace_engine.core.outputs import EngineCoreOutput
from headrace_engine.request import FinishReason
from headrace_monitoring.metrics import Metrics
from headrace_monitoring.worker_health import WorkerHealth
from headrace_workers.adapters import Adapters
from headrace_workers.dispatcher import Dispatcher
from unit.monitoring.scrape import Scrape
from unit.workers.fakes import MODEL, FakeCeleryRequest, FakeHub, FakeRedis, FakeSupervisor, FakeTokenizer, step


class Desk:
    """A dispatcher and everything around it."""

    def __init__(
        self, max_num_seqs: int = 4, logits_processors: Sequence[str] = (), publish_interval: float = 0.0
    ) -> None:
        self.redis = FakeRedis()
        self.hub = FakeHub()
        self.engine = FakeSupervisor()
        self.metrics = Metrics(model="tiny", queue="headrace.tiny")
        self.results: dict[str, dict[str, Any]] = {}
        self.given_up: list[str] = []
        self.dispatcher = Dispatcher(
            client=self.redis,  # type: ignore[arg-type]
            stream_ttl_seconds=60,
            served_names=["tiny"],
            adapters=Adapters({}),
            worker_name="w",
            tokenizer=FakeTokenizer,  # type: ignore[arg-type]
            max_num_seqs=max_num_seqs,
            max_delay_seconds=3600,
            metrics=self.metrics,
            health=WorkerHealth(),
            store_result=lambda request_id, result, _: self.results.__setitem__(request_id, result),
            on_given_up=self.given_up.append,
            logits_processors=logits_processors,
            publish_interval=publish_interval,
        )
        self.dispatcher.use_engine(self.engine)  # type: ignore[arg-type]
        self.dispatcher.attach(self.hub)
        self.dispatcher.on_engine_ready(MODEL)

    def accept(self, request: FakeCeleryRequest) -> FakeCeleryRequest:
        self.dispatcher.accept(request, lambda result: self.results.__setitem__(request.id, result))
        return request

    def generate(self, *token_ids: int, finish: FinishReason | None = None, waiting: int = 0) -> None:
        """One step: a token for each request that the engine was sent last."""
        outputs = [
            EngineCoreOutput(request_id=request.request_id, new_token_ids=[token_id], finish_reason=finish)
            for request, token_id in zip(self.engine.sent, token_ids, strict=True)
        ]
        self.dispatcher.on_engine_outputs(step(*outputs, waiting=waiting))

    def settle(self) -> None:
        """Let the finisher's thread come to rest."""
        deadline = time.monotonic() + 5
        while self.dispatcher.settlement._finisher.busy:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.hub.run_soon()

    def assert_idle(self) -> None:
        self.settle()
        assert self.dispatcher.is_idle
        assert self.dispatcher.credit() == 4
        assert self.value("headrace_requests_in_flight") == 0
        assert self.dispatcher._in_flight._output_processor is not None
        assert len(self.dispatcher._in_flight._output_processor) == 0
        assert self.hub.pending() == []

    def value(self, name: str, **labels: str) -> float:
        return Scrape(self.metrics).value(name, **labels)

    def text(self, request_id: str) -> str:
        return "".join(data["text"] for _, _, kind, data in self.redis.entries(request_id) if kind == "chunk")
