"""Embeddings through Celery and Redis, compared with the same engine without them.

    python benchmarks/embeddings_queue.py --folder FOLDER [--dtype float32] [--turns 5] [--json FILE]

A library's engine and a worker are loaded side by side. Four measurements:

1. Texts a second with 64 texts a message, in turns with `LLM.embed`, which has all texts in one call.
2. One text a message: processor time of a message, by process.
3. The time of a query of one text while the worker computes jobs of 2,048 texts, beside the length of a step.
4. Two tenants, one with 100 jobs of 2,048 texts and one with a single job: the tokens of each until the second has all.

The texts are random, of 6 to 256 tokens, as in `embeddings.py`. FOLDER is that of all-MiniLM-L6-v2.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from celery import Celery
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

import command_line
import runs
from headrace_broker import AsyncClient, RowsEvent, StreamExpiredError
from headrace_broker.server.embedded import EmbeddedServer
from headrace_cli.demo.stream_timing import percentile
from headrace_cli.local.process import LocalWorker
from headrace_engine import LLM, PoolingParams
from random_texts import mixed

TEXTS: Final = 1024
MESSAGE_TEXTS: Final = 64
SINGLE_TEXTS: Final = 512
JOB_TEXTS: Final = 2048
QUERIES: Final = 100
BIG_TENANT_JOBS: Final = 100
_TIMEOUT: Final = 600.0
_NAME: Final = "minilm"


@dataclass(frozen=True)
class Workload:
    """Texts and how many tokens each has with the model's special tokens."""

    texts: list[str]
    tokens: list[int]

    @classmethod
    def load(cls, folder: str, count: int) -> "Workload":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = tokenizer.batch_decode(mixed(count, 256, tokenizer.vocab_size))
        ids = tokenizer(texts, truncation=True, max_length=256)["input_ids"]
        return cls(texts, [len(row) for row in ids])

    def part(self, count: int) -> "Workload":
        return Workload(self.texts[:count], self.tokens[:count])

    def messages(self, size: int) -> list[list[str]]:
        return [self.texts[first : first + size] for first in range(0, len(self.texts), size)]


class Service:
    """A server, a worker and a client. Jobs are sent by plain Celery, whose messages may have 2,048 texts.

    Args:
        server, worker: their processes.
        url: of the server.
    """

    def __init__(self, client: AsyncClient, url: str, server: psutil.Process, worker: psutil.Process) -> None:
        self.client = client
        self._server = server
        self._worker = worker
        self._app = Celery("producer", broker=url, backend=url, set_as_current=False)
        self._app.conf.update(task_serializer="msgpack", result_serializer="msgpack", accept_content=["msgpack"])

    def processor_seconds(self) -> dict[str, float]:
        """Return what each process has used so far, without the worker's helpers that compute nothing."""
        named = {"client": psutil.Process(), "Redis": self._server, "worker": self._worker}
        for number, child in enumerate(self._worker.children()):
            is_engine = any("headrace_engine" in word for word in child.cmdline())
            named["engine" if is_engine else f"preparation {number}"] = child
        found: dict[str, float] = {}
        for name, process in named.items():
            kind = name.split()[0]
            found[kind] = found.get(kind, 0.0) + runs.processor_seconds([process])
        return found

    async def embed_all(self, messages: Sequence[list[str]]) -> None:
        await asyncio.gather(*(self.client.embed(texts, truncate="end", timeout=_TIMEOUT) for texts in messages))

    def send_job(self, texts: list[str], tenant: str) -> str:
        options: dict[str, Any] = {"queue": f"headrace.{_NAME}", "headers": {"tenant": tenant}}
        kwargs = {"input": texts, "truncate": "end"}
        return str(self._app.send_task("headrace.embed", kwargs=kwargs, **options).id)


@asynccontextmanager
async def running_service(folder: str, dtype: str) -> AsyncIterator[Service]:
    with tempfile.TemporaryDirectory() as scratch, EmbeddedServer() as server:
        log = Path(scratch) / "worker.log"
        settings: dict[str, Any] = {"dtype": dtype, "served_model_name": _NAME, "log_level": "WARNING"}
        with LocalWorker(model=folder, redis_url=server.url, log=log, **settings) as worker:
            worker.wait_ready()
            async with AsyncClient(server.url, model=_NAME) as client:
                await client.embed(["warm"] * 8)
                yield Service(client, server.url, psutil.Process(server.pid), psutil.Process(worker.pid))


async def throughput(llm: LLM, service: Service, work: Workload, turns: int) -> dict[str, list[float]]:
    """Return the texts a second of each turn. The first turn allocates memory and is not counted."""
    params = PoolingParams(truncate="end")
    figures: dict[str, list[float]] = {"engine": [], "queue": []}
    for turn in range(turns + 1):
        for name in sorted(figures, reverse=turn % 2 == 1):
            started = time.perf_counter()
            if name == "engine":
                await asyncio.to_thread(llm.embed, work.texts, use_tqdm=False, pooling_params=params)
            else:
                await service.embed_all(work.messages(MESSAGE_TEXTS))
            if turn:
                figures[name].append(len(work.texts) / (time.perf_counter() - started))
    return figures


async def single_texts(service: Service, work: Workload) -> dict[str, float]:
    """Return milliseconds of processor time a message of one text, by process."""
    await service.embed_all(work.messages(1))
    before = service.processor_seconds()
    await service.embed_all(work.messages(1))
    after = service.processor_seconds()
    return {name: 1000 * (after[name] - before[name]) / len(work.texts) for name in before}


async def queries(service: Service, work: Workload) -> dict[str, list[float]]:
    """Return milliseconds of queries on an idle worker and beside jobs, and of the steps beside which they ran."""
    draw = random.Random(3)
    found: dict[str, list[float]] = {"idle": [], "beside jobs": [], "step": []}
    for _ in range(QUERIES):
        found["idle"].append(await _query(service))
    jobs = asyncio.create_task(_keep_busy(service, work, found["step"]))
    while len(found["step"]) < 3 and not jobs.done():
        await asyncio.sleep(0.01)
    for _ in range(QUERIES):
        await asyncio.sleep(draw.uniform(0.0, 0.2))  # so that queries come at any time of a step
        found["beside jobs"].append(await _query(service))
    if jobs.done():
        jobs.result()  # raises what ended it
    jobs.cancel()
    await asyncio.gather(jobs, return_exceptions=True)
    return found


async def _query(service: Service) -> float:
    started = time.perf_counter()
    await service.client.embed(["where is the mill"], tenant="interactive", timeout=_TIMEOUT)
    return 1000 * (time.perf_counter() - started)


async def _keep_busy(service: Service, work: Workload, steps: list[float]) -> None:
    """Have two jobs in the service until this task is cancelled, and append the milliseconds between their rows."""
    sent = [service.send_job(work.texts, "batch") for _ in range(2)]
    try:
        while True:
            last = None
            async for event in service.client.events(sent[0], timeout=_TIMEOUT):
                if isinstance(event, RowsEvent):
                    now = time.perf_counter()
                    if last is not None:
                        steps.append(1000 * (now - last))
                    last = now
            sent = [sent[1], service.send_job(work.texts, "batch")]
    finally:
        for request_id in sent:
            await service.client.cancel(request_id)


async def tenants(service: Service, work: Workload) -> dict[str, int]:
    """Return the tokens of both tenants from the first row of the small one until its last."""
    big = [service.send_job(work.texts, "big") for _ in range(BIG_TENANT_JOBS)]
    counts: Counter[str] = Counter()
    small = ""
    done = 0
    async for _, event in service.client.events_many(big[:4], timeout=_TIMEOUT):
        if isinstance(event, RowsEvent):  # the big tenant's first job is being computed
            small = service.send_job(work.texts, "small")
            break
    async for request_id, event in service.client.events_many([small, *big], timeout=_TIMEOUT):
        if isinstance(event, StreamExpiredError):
            raise event
        tenant = "small" if request_id == small else "big"
        if isinstance(event, RowsEvent):
            if tenant == "small" or counts["small"]:
                counts[tenant] += sum(work.tokens[event.first : event.first + event.count])
            done += event.count if tenant == "small" else 0
        if done == len(work.texts):
            break
    for request_id in big:
        await service.client.cancel(request_id)
    return counts


async def measure(folder: str, dtype: str, turns: int) -> dict[str, Any]:
    work = Workload.load(folder, JOB_TEXTS)
    llm = LLM(folder, dtype=dtype)
    async with running_service(folder, dtype) as service:
        return {
            "texts_per_second": await throughput(llm, service, work.part(TEXTS), turns),
            "processor_ms": await single_texts(service, work.part(SINGLE_TEXTS)),
            "query_ms": await queries(service, work),
            "tenant_tokens": await tenants(service, work),
        }


def report(figures: dict[str, Any], title: str) -> None:
    table = Table("", "", title=title, title_justify="left")
    rates = figures["texts_per_second"]
    ratios = [queue / engine for engine, queue in zip(rates["engine"], rates["queue"], strict=True)]
    for name, own in rates.items():
        table.add_row(f"texts a second, {name}", f"{statistics.median(own):.1f}")
    table.add_row("queue / engine, median of pairs", f"{statistics.median(ratios):.3f}")
    table.add_row("its range", f"{min(ratios):.3f} to {max(ratios):.3f}")
    for name, milliseconds in figures["processor_ms"].items():
        table.add_row(f"one text a message, ms of {name}", f"{milliseconds:.2f}")
    for name, own in figures["query_ms"].items():
        table.add_row(f"{name}, ms p50, p99", f"{statistics.median(own):.1f}, {percentile(own, 99):.1f}")
    counts = figures["tenant_tokens"]
    share = counts["small"] / (counts["small"] + counts["big"])
    table.add_row("tokens of the small tenant", f"{counts['small']:,} ({100 * share:.1f} %)")
    table.add_row("tokens of the big tenant meanwhile", f"{counts['big']:,}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="model that embeds, such as all-MiniLM-L6-v2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--turns", type=command_line.count, default=5, help="of each side of the first measurement")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.folder, options.dtype, options.turns))
    report(figures, f"{Path(options.folder).name}, {options.dtype}")
    if options.json:
        runs.save(options.json, **figures)


if __name__ == "__main__":
    main()
