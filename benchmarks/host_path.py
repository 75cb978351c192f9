"""What a step costs beside the model: the scheduler with 256 requests that decode, and the publisher's chunks.

    python benchmarks/host_path.py [--json FILE]

Milliseconds by the clock for the scheduler, before the step and after it, without a model; microseconds of the
processor a chunk for the publisher, which writes a step's chunks to a server of its own in one call.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

import runs
from headrace_broker.connections import connect
from headrace_broker.embedded import EmbeddedServer
from headrace_broker.streams import StreamWrite, StreamWriter
from headrace_engine.config import SchedulerConfig
from headrace_engine.core.kv_cache_manager import KVCacheManager
from headrace_engine.core.scheduler import Scheduler
from headrace_engine.request import EngineCoreRequest, Request
from headrace_engine.runner.contracts import Capabilities, StepOutput
from headrace_engine.sampling_params import SamplingParams
from headrace_monitoring.metrics import Metrics
from headrace_workers.publisher import Publisher

_REQUESTS = 256
_CHUNKS = (64, 256)
_STEPS = 350
_BLOCK_SIZE = 16
_PROMPT_TOKENS = 128
_MAX_MODEL_LEN = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    schedule, update = scheduler_milliseconds()
    publish = {chunks: publisher_microseconds(chunks) for chunks in _CHUNKS}
    table = Table(title=f"{_REQUESTS} requests decode", title_justify="left")
    for column in ("", "median", "99 %"):
        table.add_column(column, justify="right")
    for what, figures in (
        ("schedule, ms a step", schedule),
        ("update from the output, ms a step", update),
        *((f"publisher, us of the processor a chunk, {chunks} a step", publish[chunks]) for chunks in _CHUNKS),
    ):
        table.add_row(what, f"{statistics.median(figures):.3f}", f"{statistics.quantiles(figures, n=100)[-1]:.3f}")
    Console().print(table)
    if args.json:
        runs.save(args.json, schedule_ms=schedule, update_ms=update, publish_us_per_chunk=publish)


def scheduler_milliseconds() -> tuple[list[float], list[float]]:
    """Of each step in which all requests decode: before the model computes, and after."""
    blocks = _REQUESTS * _MAX_MODEL_LEN // _BLOCK_SIZE + 1
    config = SchedulerConfig(max_num_seqs=_REQUESTS, max_num_batched_tokens=_REQUESTS * _PROMPT_TOKENS)
    scheduler = Scheduler(config, KVCacheManager(blocks, _BLOCK_SIZE), Capabilities(), _MAX_MODEL_LEN)
    for number in range(_REQUESTS):
        scheduler.add_request(_request(number))
    before: list[float] = []
    after: list[float] = []
    while len(before) < _STEPS:
        started = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        output = StepOutput(sampled_token_ids={request_id: [7] for request_id in batch.num_scheduled_tokens})
        computed = time.perf_counter()
        scheduler.update_from_output(batch, output)
        if not batch.new_requests:
            before.append(1e3 * (scheduled - started))
            after.append(1e3 * (time.perf_counter() - computed))
    return before, after


def _request(number: int) -> Request:
    # prompts of one length would all need their next block in the same step
    prompt = [number, *range(_PROMPT_TOKENS - 1 - number % _BLOCK_SIZE)]
    params = SamplingParams(max_tokens=_MAX_MODEL_LEN - _PROMPT_TOKENS, ignore_eos=True, temperature=0.0)
    message = EngineCoreRequest(
        request_id=f"{number:032x}-0", prompt_token_ids=prompt, sampling_params=params, seed=number, eos_token_ids=[2]
    )
    return Request(message, _BLOCK_SIZE)


def publisher_microseconds(chunks: int) -> list[float]:
    """Of this thread, one figure a step: from a chunk's data to Redis's answer."""
    with EmbeddedServer() as server, connect(server.url) as client:
        writer = StreamWriter(client, ttl_seconds=60)
        request_ids = [f"{number:032x}" for number in range(chunks)]
        attempts = [writer.claim(request_id, "host-path").attempt for request_id in request_ids]
        publisher = Publisher(writer, Metrics(model="host-path", queue="host-path"))
        figures = []
        for step in range(1, _STEPS + 1):
            started = time.thread_time()
            publisher.add(_chunks(request_ids, attempts, step))
            refused = publisher.flush()
            figures.append(1e6 * (time.thread_time() - started) / chunks)
            if refused != {}:
                raise SystemExit(f"step {step} was not taken: {refused}")
        return figures


def _chunks(request_ids: Sequence[str], attempts: Sequence[int], step: int) -> list[StreamWrite]:
    return [
        StreamWrite.chunk(request_id, attempt, step, index=0, token_ids=[7], text=" word")
        for request_id, attempt in zip(request_ids, attempts, strict=True)
    ]


if __name__ == "__main__":
    main()
