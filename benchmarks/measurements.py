"""The measurements, each in its own process: `python measurements.py NAME --model FOLDER --dtype DTYPE`.

The last line of output has the figures as JSON. `runs.py` starts these processes. People run `throughput.py` and
`latency.py` instead.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import workload
from headrace_cli.demo.stream_timing import StreamTiming, summarise
from workload import BenchmarkRequest

BASELINE_REQUESTS = 8
_SINGLE = BenchmarkRequest([1, 2, 3, 4] * 8, 128)


@dataclass(frozen=True, slots=True)
class Setup:
    """The model, the workload and the engine's options of a measurement."""

    model: str
    dtype: str
    workload: str
    rate: float  # requests per second
    quantization: str | None
    kv_cache_dtype: str
    enable_prefix_caching: bool = True

    @property
    def engine_options(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache_dtype,
            "enable_prefix_caching": self.enable_prefix_caching,
        }

    def requests(self) -> list[BenchmarkRequest]:
        return workload.load(self.workload)


def offline(setup: Setup) -> dict[str, Any]:
    """Measure `LLM.generate` on all requests at once."""
    begun = time.perf_counter()
    llm = _loaded(setup)
    ready = time.perf_counter()
    return _generate(llm, setup) | {"startup_seconds": ready - begun}


def turns(setup: Setup) -> dict[str, Any]:
    """Measure as `offline`, for each workload that a line of standard input names. The model stays loaded."""
    llm = _loaded(replace(setup, enable_prefix_caching=False))
    for line in sys.stdin:
        print(json.dumps(_generate(llm, replace(setup, workload=line.strip()))), flush=True)
    return {}


def _loaded(setup: Setup) -> Any:
    from headrace_engine import LLM

    return LLM(setup.model, **setup.engine_options)


def _generate(llm: Any, setup: Setup) -> dict[str, Any]:
    from headrace_engine import SamplingParams

    requests = setup.requests()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)  # touch everything once
    started = time.perf_counter()
    outputs = llm.generate(
        [request.prompt_token_ids for request in requests],
        [SamplingParams.from_dict(request.sampling_params) for request in requests],
        use_tqdm=False,
    )
    seconds = time.perf_counter() - started
    return _figures(setup, seconds, [output.outputs[0].token_ids for output in outputs])


def queue(setup: Setup) -> dict[str, Any]:
    """Measure the same requests through Redis and a Celery worker. This process reads every stream to its end."""
    return asyncio.run(_on_a_service(setup, setup.requests(), delays=None))


def queue_poisson(setup: Setup) -> dict[str, Any]:
    """Measure requests through the queue that arrive one by one."""
    requests = setup.requests()
    return asyncio.run(_on_a_service(setup, requests, workload.arrivals(len(requests), setup.rate)))


def engine_poisson(setup: Setup) -> dict[str, Any]:
    """Measure requests that arrive one by one at an `AsyncLLMEngine`, without a queue."""
    requests = setup.requests()
    return asyncio.run(_on_an_engine(setup, requests, workload.arrivals(len(requests), setup.rate)))


def single(setup: Setup) -> dict[str, Any]:
    """Measure one request alone."""
    return asyncio.run(_on_an_engine(setup, [_SINGLE], [0.0]))


def phases(setup: Setup) -> dict[str, Any]:
    """Measure the phases of the engine's steps, in milliseconds per step on average."""
    from headrace_engine import LLM, SamplingParams
    from headrace_engine.core.engine_core import EngineCore

    totals: Counter[str] = Counter()
    steps = 0
    step: Callable[[EngineCore], Any] = EngineCore.step

    def counted(core: EngineCore) -> Any:
        nonlocal steps
        outputs = step(core)
        if outputs.stats is not None and outputs.stats.phase_seconds:
            totals.update(outputs.stats.phase_seconds)
            steps += 1
        return outputs

    EngineCore.step = counted  # type: ignore[assignment,method-assign]
    llm = LLM(setup.model, **setup.engine_options)
    requests = setup.requests()
    started = time.perf_counter()
    llm.generate(
        [request.prompt_token_ids for request in requests],
        [SamplingParams.from_dict(request.sampling_params) for request in requests],
        use_tqdm=False,
    )
    seconds = time.perf_counter() - started
    named = {name: 1000 * value / steps for name, value in sorted(totals.items(), key=lambda item: -item[1])}
    outside = 1000 * (seconds - sum(totals.values())) / steps
    return {"steps": steps, "milliseconds": named | {"outside the step": outside}}


def transformers(setup: Setup) -> dict[str, Any]:
    """Measure transformers' `generate`, one request after the other. Only the first few: each takes long."""
    import torch
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, setup.dtype)).eval()
    outputs = []
    started = time.perf_counter()
    for request in setup.requests()[:BASELINE_REQUESTS]:
        prompt = torch.tensor([request.prompt_token_ids])
        ids = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.max_tokens,
            min_new_tokens=request.max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        outputs.append(ids[0, prompt.shape[1] :].tolist())
    return _figures(setup, time.perf_counter() - started, outputs)


async def _on_an_engine(setup: Setup, requests: Sequence[BenchmarkRequest], delays: list[float]) -> dict[str, Any]:
    async with running_engine(setup) as engine:
        return summarise(await through_engine(engine, requests, delays))


async def _on_a_service(
    setup: Setup, requests: Sequence[BenchmarkRequest], delays: list[float] | None
) -> dict[str, Any]:
    async with running_service(setup) as client:
        started = time.perf_counter()
        timings, token_ids = await through_queue(client, requests, delays)
        seconds = time.perf_counter() - started
    return _figures(setup, seconds, token_ids) | summarise(timings)


@asynccontextmanager
async def running_engine(setup: Setup) -> AsyncIterator[Any]:
    """Run an `AsyncLLMEngine` that has already served a request."""
    from headrace_engine import AsyncEngineArgs, AsyncLLMEngine

    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=setup.model, **setup.engine_options))
    try:
        await through_engine(engine, [BenchmarkRequest([1, 2, 3], 8)], [0.0])
        yield engine
    finally:
        await engine.shutdown()


async def through_engine(
    engine: Any, requests: Sequence[BenchmarkRequest], delays: Sequence[float]
) -> list[StreamTiming]:
    """Send each request at its time, and read every stream to its end."""
    from headrace_engine import RequestOutputKind, SamplingParams

    async def one(request: BenchmarkRequest, delay: float) -> StreamTiming:
        await asyncio.sleep(delay)
        timing = StreamTiming(time.perf_counter())
        params = SamplingParams(**request.sampling_params, output_kind=RequestOutputKind.DELTA)
        async for output in engine.generate(request.prompt_token_ids, params, uuid.uuid4().hex):
            timing.arrived(time.perf_counter(), len(output.outputs[0].token_ids))
        return timing

    return await asyncio.gather(*(one(*each) for each in zip(requests, delays, strict=True)))


async def through_queue(
    client: Any, requests: Sequence[BenchmarkRequest], delays: Sequence[float] | None = None
) -> tuple[list[StreamTiming], list[list[int]]]:
    """Send all requests at once and read them over one connection; with `delays`, send each at its time.

    Returns the timing and the token ids of each request.
    """
    from headrace_broker import ChunkEvent, StreamExpiredError

    started = time.perf_counter()
    token_ids: dict[str, list[int]] = {}
    timings: dict[str, StreamTiming] = {}

    async def follow(request_ids: list[str]) -> None:
        async for request_id, event in client.events_many(request_ids, timeout=600):
            if isinstance(event, ChunkEvent):
                timings[request_id].arrived(time.perf_counter(), len(event.token_ids))
                token_ids[request_id] += event.token_ids
            elif isinstance(event, StreamExpiredError):
                raise event

    async def one(request: BenchmarkRequest, delay: float) -> None:
        await asyncio.sleep(delay)
        sent_at = time.perf_counter()
        request_id = await client.submit(
            prompt_token_ids=request.prompt_token_ids, sampling_params=request.sampling_params
        )
        timings[request_id], token_ids[request_id] = StreamTiming(sent_at), []
        await follow([request_id])

    if delays is None:
        request_ids = await client.submit_many(
            {"prompt_token_ids": request.prompt_token_ids, "sampling_params": request.sampling_params}
            for request in requests
        )
        timings.update({request_id: StreamTiming(started) for request_id in request_ids})
        token_ids.update({request_id: [] for request_id in request_ids})
        await follow(request_ids)
    else:
        await asyncio.gather(*(one(*each) for each in zip(requests, delays, strict=True)))
    return list(timings.values()), list(token_ids.values())


@asynccontextmanager
async def running_service(setup: Setup, **more: object) -> AsyncIterator[Any]:
    """Run a server, a worker that has already served a request, and a client. `more` are settings of the worker."""
    from headrace_broker import AsyncClient
    from headrace_broker.server.embedded import EmbeddedServer
    from headrace_cli.local.process import LocalWorker

    settings: dict[str, Any] = {"log_level": "WARNING"}
    settings |= {name: value for name, value in setup.engine_options.items() if value is not None} | more
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer() as server:
        log = Path(folder) / "worker.log"
        with LocalWorker(model=setup.model, redis_url=server.url, log=log, **settings) as worker:
            worker.wait_ready()
            async with AsyncClient(server.url, model=Path(setup.model).name) as client:
                warm = await client.submit(
                    prompt_token_ids=[1, 2, 3], sampling_params={"max_tokens": 2, "temperature": 0.0}
                )
                await client.result(warm)
                yield client


def _figures(setup: Setup, seconds: float, outputs: list[list[int]]) -> dict[str, Any]:
    num_tokens = sum(map(len, outputs))
    figures: dict[str, Any] = {
        "seconds": seconds,
        "output_tokens": num_tokens,
        "output_tokens_per_second": num_tokens / seconds,
        "requests": len(outputs),
    }
    if setup.workload == "mixed":
        expected = workload.expected_fp32()
        figures["equal_to_fp32"] = sum(own == known for own, known in zip(outputs, expected, strict=False))
    return figures


MEASUREMENTS: dict[str, Callable[[Setup], dict[str, Any]]] = {
    function.__name__: function
    for function in (offline, turns, queue, queue_poisson, engine_poisson, single, phases, transformers)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=MEASUREMENTS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--workload", default="mixed", choices=workload.NAMES)
    parser.add_argument("--rate", type=float, default=2.6)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    setup = Setup(args.model, args.dtype, args.workload, args.rate, args.quantization, args.kv_cache_dtype)
    print(json.dumps(MEASUREMENTS[args.name](setup)))


if __name__ == "__main__":
    main()
