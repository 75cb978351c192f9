"""The demo: eight streams at once from a real model, through a real queue and worker process, with checked results.

Everything runs on this machine. After the demo only the model remains, in the user's cache.
"""

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from celery.result import AsyncResult

from headrace_broker.app import make_app
from headrace_broker.client.async_client import AsyncClient
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.settings import BrokerSettings
from headrace_cli.demo.steady_load import TENANTS
from headrace_cli.demo.stream_timing import StreamTiming, summarise
from headrace_cli.errors import DemoFailedError
from headrace_cli.exporter import Exporter
from headrace_cli.local.process import LocalWorker

QUESTIONS = (
    "What is a mill race, and what does it drive?",
    "Explain to a child why the sky is blue.",
    "Write a short poem about a river.",
    "Give three tips for learning to cook.",
    "What is the capital of France, and what is it known for?",
    "Describe how bread is made, step by step.",
    "Why do leaves change their colour in autumn?",
    "Tell me a fun fact about the moon.",
)
MAX_TOKENS = 96
WORKER_PORT = 9464
EXPORTER_PORT = 9465
_STREAM_TIMEOUT = 120.0


@dataclass(slots=True)
class DemoAnswer:
    """A question, and the part of its answer that has arrived."""

    question: str
    text: str = ""
    finish_reason: str | None = None
    timing: StreamTiming = field(default_factory=lambda: StreamTiming(0.0))


@dataclass(slots=True)
class Report:
    answers: list[DemoAnswer]
    figures: dict[str, float]
    """From `stream_timing.summarise`."""
    metrics_url: str
    model: str
    """Served name."""


@dataclass(slots=True)
class Demo:
    """Run the whole service once.

    Args:
        model: model folder; its last part is the served name.
        progress: called with one sentence for each stage.
        draw: called with all answers after each chunk.
        keep: called with the report and the URL of Redis after all answers. The service ends when `keep` returns.
        watched: also run an exporter, and serve metrics on the default ports, so that Prometheus finds them.
    """

    model: Path
    progress: Callable[[str], None]
    draw: Callable[[Sequence[DemoAnswer]], None]
    keep: Callable[[Report, str], None] | None = None
    watched: bool = False

    def run(self) -> Report:
        """Return the report. Raises HeadraceCommandError or HeadraceBrokerError if a part fails."""
        with contextlib.ExitStack() as stack:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-demo-"))) / "worker.log"
            server = stack.enter_context(EmbeddedServer())
            self.progress(f"queue: {BrokerSettings(redis_url=server.url).safe_url}")
            worker = stack.enter_context(
                LocalWorker(
                    model=str(self.model),
                    redis_url=server.url,
                    log=log,
                    port=WORKER_PORT if self.watched else 0,
                    grace_seconds=5,
                    tenants=",".join(TENANTS),
                )
            )
            if self.watched:
                self._watch(stack, server.url)
            self.progress(f"worker: process {worker.pid} is loading {self.model.name}")
            worker.wait_ready()
            self.progress(f"worker: ready; metrics on {worker.url}/metrics")
            report = self._ask(server.url, worker.url)
            if self.keep is not None:
                self.keep(report, server.url)
        return report

    def _watch(self, stack: contextlib.ExitStack, redis_url: str) -> None:
        exporter = Exporter(stack.enter_context(connect(redis_url)), port=EXPORTER_PORT)
        stack.enter_context(exporter.server)
        thread = threading.Thread(target=exporter.keep_polling, name="exporter", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(exporter.stop)
        self.progress(f"exporter: metrics on {exporter.server.url}/metrics")

    def _ask(self, redis_url: str, worker_url: str) -> Report:
        answers = [DemoAnswer(question) for question in QUESTIONS]
        request_ids = asyncio.run(self._stream_all(redis_url, answers))
        _check_results(redis_url, request_ids, answers)
        return Report(answers, summarise(answer.timing for answer in answers), f"{worker_url}/metrics", self.model.name)

    async def _stream_all(self, redis_url: str, answers: list[DemoAnswer]) -> list[str]:
        async with AsyncClient(redis_url, model=self.model.name) as client:
            sent_at = time.monotonic()
            request_ids = await client.submit_many(
                {
                    "messages": [{"role": "user", "content": answer.question}],
                    "sampling_params": {"temperature": 0.0, "repetition_penalty": 1.1, "max_tokens": MAX_TOKENS},
                }
                for answer in answers
            )
            for answer in answers:
                answer.timing.sent_at = sent_at
            streams = zip(request_ids, answers, strict=True)
            await asyncio.gather(*(self._follow(client, i, answer, answers) for i, answer in streams))
        return request_ids

    async def _follow(
        self, client: AsyncClient, request_id: str, answer: DemoAnswer, answers: list[DemoAnswer]
    ) -> None:
        async for chunk in client.stream(request_id, timeout=_STREAM_TIMEOUT):
            answer.text += chunk.text
            answer.finish_reason = chunk.finish_reason
            answer.timing.arrived(time.monotonic(), len(chunk.token_ids))
            self.draw(answers)


def _check_results(redis_url: str, request_ids: Sequence[str], answers: Sequence[DemoAnswer]) -> None:
    """Raise DemoFailedError if an `AsyncResult.get()` differs from its stream."""
    with make_app(BrokerSettings(redis_url=redis_url)) as app:
        for request_id, answer in zip(request_ids, answers, strict=True):
            result = AsyncResult(request_id, app=app).get(timeout=30)
            if result["outputs"][0]["text"] != answer.text:
                raise DemoFailedError(f"the result of request {request_id} differs from its stream")
