"""The same text has the same bytes wherever a batch-invariant model computes it, through a real queue and worker."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chaos.recorder import Record
from engine.pooling.tiny_pooling_models import NORMALIZE, SIZE, add_modules, build, pooling, words
from headrace_broker import BrokerSettings, Client
from headrace_broker.streams.events import StartEvent
from headrace_engine import LLM
from headrace_engine.runner.linear import packed_linear
from service.workers.service import DEADLINE, QUEUE, Service

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/pooling", "engine/headrace_engine/runner/linear", "workers/headrace_workers/requests"
)

OTHERS = 2047
STEP_TOKENS = 256


def make_texts() -> list[str]:
    draw, vocabulary = random.Random(3), words()
    return [" ".join(draw.choices(vocabulary, k=draw.randrange(1, 30))) for _ in range(OTHERS + 1)]


def rows_of(result: dict[str, dict[str, bytes]]) -> list[bytes]:
    rows = np.frombuffer(result["data"]["bytes"], "<f4").reshape(-1, SIZE)
    return [row.tobytes() for row in rows]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_has_the_same_bytes_alone_among_2047_others_in_another_order_and_after_a_resume(
    make_service: Callable[[], Service], tmp_path: Path, dtype: str
) -> None:
    if dtype == "bfloat16" and not packed_linear.computes_bfloat16():
        pytest.skip("this CPU computes no bfloat16 products")
    folder = tmp_path / "bert"
    build(folder, "bert")
    add_modules(folder, [pooling(), NORMALIZE])
    if not LLM(str(folder), dtype=dtype).pooling_engine.info.batch_invariant:
        pytest.skip("this machine's products are not batch-invariant")
    service = make_service()
    settings = {"model": str(folder), "dtype": dtype, "max_num_batched_tokens": STEP_TOKENS, "lease_seconds": 2}
    slow = {
        **Record(tmp_path / "record").environ,
        "TEST_STEP_SECONDS": "0.01",
    }  # so that the worker dies before the end
    worker = service.start_worker(environ=slow, **settings).wait_ready()
    texts = make_texts()

    def embed(inputs: list[str]) -> list[bytes]:
        return rows_of(service.app.send_task("headrace.embed", kwargs={"input": inputs}, queue=QUEUE).get(DEADLINE))

    together = embed(texts)
    assert len(together) == len(texts)
    chosen = random.Random(4).sample(range(len(texts)), 24)
    assert [embed([texts[index]]) for index in chosen] == [[together[index]] for index in chosen]
    order = random.Random(5).sample(range(len(texts)), len(texts))
    assert embed([texts[index] for index in order]) == [together[index] for index in order]

    resumed = service.app.send_task("headrace.embed", kwargs={"input": texts}, queue=QUEUE)
    with Client(BrokerSettings(redis_url=service.url), model="tiny") as client:
        service.wait_until(lambda: client.status(resumed.id).rows > 0)
        worker.process.send_signal(signal.SIGKILL)
        worker.process.wait()
        assert client.status(resumed.id).state == "running", "the job ended before the worker died"
        service.start_worker(**settings)
        assert rows_of(resumed.get(timeout=DEADLINE)) == together
        starts = [event for event in client.events(resumed.id, timeout=DEADLINE) if isinstance(event, StartEvent)]
        assert len(starts) == 2
