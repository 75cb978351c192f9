"""The cost of a step beside the model: the scheduler with 256 decoding requests, and the worker's chunks.

    python benchmarks/host_path.py [--json FILE]

For the scheduler it shows wall-clock milliseconds, before the step and after it, without a model. For the publisher it
shows microseconds of processor time per chunk; it writes the chunks of a step to a Redis server in one call. For the
worker it shows the same for all its work on a chunk, from the engine's frame on: text, record, metrics, publisher.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgpack
from rich.console import Console
from rich.table import Table

import runs
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_engine.api.input_processor import InputProcessor
from headrace_engine.checkpoints import default_model
from headrace_engine.core.kv_cache_manager import KVCacheManager
from headrace_engine.core.outputs import EngineCoreOutput, EngineCoreOutputs, StepStats
from headrace_engine.core.scheduler import Scheduler
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.config import SchedulerConfig
from headrace_engine.requests.request import EngineCoreRequest, Request
from headrace_engine.requests.sampling_params import RequestOutputKind, SamplingParams
from headrace_engine.runner.contracts import ModelInfo, RunnerCapabilities, StepOutput
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_loader import parts_of, read_tokenizer
from headrace_monitoring.metrics import Metrics
from headrace_workers.requests.engine_outputs import TextOutputs
from headrace_workers.requests.generate_job import ChoiceRecord, GenerateJob
from headrace_workers.requests.in_flight import InFlight
from headrace_workers.requests.publisher import Publisher
from headrace_workers.requests.settlement import Settlement
from headrace_workers.requests.stream_homes import StreamHomes
from headrace_workers.requests.tracing import RequestTracing

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
    model = str(default_model.fetch("bfloat16"))
    tokenizer = ModelTokenizer(parts_of(read_tokenizer(model, trust_remote_code=False)))
    gc.freeze()  # exempts torch's objects: the tokenizer imports torch here, but a worker's main process does not
    schedule, update = scheduler_milliseconds()
    publish = {chunks: publisher_microseconds(chunks) for chunks in _CHUNKS}
    worker = {chunks: worker_microseconds(tokenizer, chunks) for chunks in _CHUNKS}
    table = Table(title=f"{_REQUESTS} requests decode", title_justify="left")
    for column in ("", "5 %", "median", "99 %"):
        table.add_column(column, justify="right")
    for what, figures in (
        ("schedule, ms a step", schedule),
        ("update from the output, ms a step", update),
        *((f"publisher, us of the processor a chunk, {chunks} a step", publish[chunks]) for chunks in _CHUNKS),
        *((f"all of the worker, the same, {chunks} a step", worker[chunks]) for chunks in _CHUNKS),
    ):
        hundredths = statistics.quantiles(figures, n=100)
        table.add_row(what, *(f"{hundredths[percent - 1]:.3f}" for percent in (5, 50, 99)))
    Console().print(table)
    if args.json:
        runs.save(
            args.json,
            schedule_ms=schedule,
            update_ms=update,
            publish_us_per_chunk=publish,
            worker_us_per_chunk=worker,
        )


def scheduler_milliseconds() -> tuple[list[float], list[float]]:
    """Return the milliseconds before and after the model, for each step in which all requests decode."""
    blocks = _REQUESTS * _MAX_MODEL_LEN // _BLOCK_SIZE + 1
    config = SchedulerConfig(max_num_seqs=_REQUESTS, max_num_batched_tokens=_REQUESTS * _PROMPT_TOKENS)
    scheduler = Scheduler(config, KVCacheManager(blocks, _BLOCK_SIZE), RunnerCapabilities(), _MAX_MODEL_LEN)
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
    """Return microseconds of this thread per chunk, one figure per step: from a chunk's data to Redis's answer."""
    with EmbeddedServer() as server, connect(server.url) as client:
        writer = StreamWriter(client, ttl_seconds=60)
        request_ids = [f"{number:032x}" for number in range(chunks)]
        attempts = [writer.claim(request_id, "host-path").attempt for request_id in request_ids]
        publisher = Publisher(writer, Metrics(model="host-path", queue="host-path"))
        figures = []
        for step in range(1, _STEPS + 1):
            started = time.thread_time()
            publisher.add(*_chunks(request_ids, attempts, step))
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


def worker_microseconds(tokenizer: ModelTokenizer, chunks: int) -> list[float]:
    """Return the same as `publisher_microseconds`, but measured from the frame that the engine sends."""
    with EmbeddedServer() as server, connect(server.url) as client:
        metrics, tracing = Metrics(model="host-path", queue="host-path"), RequestTracing(None, "host-path")
        homes = StreamHomes(StreamServers(client, {}, 60), 60)
        engine: Any = _NoEngine(tokenizer)
        settlement = Settlement(homes, metrics, _forget_result, tracing, on_refused=lambda _reason: None)
        in_flight = InFlight(homes, engine, settlement, metrics, tracing, max_num_seqs=chunks)
        in_flight.use_engine(EngineCapabilities.of_everything(), TextOutputs(tokenizer))
        for number in range(chunks):
            in_flight.start(_job(homes.main, tokenizer, f"{number:032x}"), None, lambda _job: None)
        choice_ids = [choice.request_id for job in in_flight for choice in job.core_requests()]
        words = tokenizer.encode("A quick brown fox jumps over a lazy dog, and many another word comes behind it.")
        figures = []
        for step in range(_STEPS):
            news = [EngineCoreOutput(name, [words[(step + row) % len(words)]]) for row, name in enumerate(choice_ids)]
            frame = msgpack.packb(EngineCoreOutputs(outputs=news, stats=StepStats()).to_wire())
            started = time.thread_time()
            in_flight.publish(EngineCoreOutputs.from_wire(msgpack.unpackb(frame)))
            figures.append(1e6 * (time.thread_time() - started) / chunks)
        if len(in_flight) < chunks:
            raise SystemExit(f"of {chunks} streams only {len(in_flight)} took every chunk")
        return figures


def _job(writer: StreamWriter, tokenizer: ModelTokenizer, request_id: str) -> GenerateJob:
    info = ModelInfo(
        vocab_size=tokenizer.backend.get_vocab_size(),
        max_model_len=_MAX_MODEL_LEN,
        eos_token_ids=[],
        architecture="",
        dtype="",
        device="",
        attention="",
        num_parameters=0,
    )
    params = SamplingParams(max_tokens=_STEPS + 1, output_kind=RequestOutputKind.DELTA)
    request = InputProcessor(info, tokenizer).process(request_id, [1, 2, 3], params)
    claim = writer.claim(request_id, "host-path")
    choices = [ChoiceRecord() for _ in request.choices]
    message: Any = _NoMessage()
    return GenerateJob(celery_request=message, request=request, attempt=claim.attempt, choices=choices, queued_at=None)


class _NoEngine:
    is_ready, pid = True, 0

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.tokenizer = tokenizer

    def send(self, requests: object) -> None: ...

    def abort(self, request_ids: object) -> None: ...


class _NoMessage:
    def on_accepted(self, pid: int, at: float) -> None: ...


def _forget_result(request_id: str, result: object, reason: str) -> None: ...


if __name__ == "__main__":
    main()
