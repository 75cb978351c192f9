"""Output tokens a second: the engine alone, the same engine behind the queue, and transformers one request at a time.

    python benchmarks/throughput.py [--dtype bfloat16] [--runs 3] [--json FILE]

Each measurement runs in a process of its own, and the first two alternate, so that a machine whose speed drifts does
not favour one. No figure is a test: nothing fails because a machine is slow. The answers are compared, though: in
float32 they must be the known ones.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import workload
from headrace_workers import default_model
from headrace_workers.stream_timing import StreamTiming, summarise

BASELINE_REQUESTS = 8


def measure_offline(model: str, dtype: str) -> dict[str, Any]:
    """`LLM.generate` on all requests at once."""
    from headrace_engine import LLM, SamplingParams

    llm = LLM(model, dtype=dtype)
    requests = workload.load()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)  # touch everything once
    started = time.perf_counter()
    outputs = llm.generate(
        [request.prompt_token_ids for request in requests],
        [SamplingParams.from_dict(request.sampling_params) for request in requests],
        use_tqdm=False,
    )
    seconds = time.perf_counter() - started
    return _figures(seconds, [output.outputs[0].token_ids for output in outputs])


def measure_queue(model: str, dtype: str) -> dict[str, Any]:
    """The same requests through Redis and a Celery worker, every stream read to its end by this process."""
    from headrace_broker.embedded import EmbeddedServer
    from headrace_workers.local_worker import LocalWorker

    with tempfile.TemporaryDirectory() as folder, EmbeddedServer() as server:
        log = Path(folder) / "worker.log"
        with LocalWorker(model=model, redis_url=server.url, log=log, dtype=dtype, log_level="WARNING") as worker:
            worker.wait_ready()
            return asyncio.run(_stream_all(server.url, Path(model).name))


async def _stream_all(redis_url: str, served_name: str) -> dict[str, Any]:
    from headrace_broker import AsyncClient, ChunkEvent

    requests = workload.load()
    async with AsyncClient(redis_url, model=served_name) as client:
        warm = await client.submit(prompt_token_ids=[1, 2, 3], sampling_params={"max_tokens": 2, "temperature": 0.0})
        await client.result(warm)
        started = time.perf_counter()
        request_ids = await client.submit_many(
            {"prompt_token_ids": request.prompt_token_ids, "sampling_params": request.sampling_params}
            for request in requests
        )
        timings = {request_id: StreamTiming(started) for request_id in request_ids}
        token_ids: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        async for request_id, event in client.events_many(request_ids, timeout=600):
            if isinstance(event, ChunkEvent):
                timings[request_id].arrived(time.perf_counter(), len(event.token_ids))
                token_ids[request_id] += event.token_ids
        seconds = time.perf_counter() - started
    return _figures(seconds, list(token_ids.values())) | {"latency": summarise(timings.values())}


def measure_transformers(model: str, dtype: str) -> dict[str, Any]:
    """`generate` of transformers, one request after the other; the first few requests only, as it takes minutes."""
    import torch
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    outputs = []
    started = time.perf_counter()
    for request in workload.load()[:BASELINE_REQUESTS]:
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
    return _figures(time.perf_counter() - started, outputs)


def _figures(seconds: float, outputs: list[list[int]]) -> dict[str, Any]:
    num_tokens = sum(map(len, outputs))
    expected = workload.expected_fp32()
    return {
        "seconds": seconds,
        "output_tokens": num_tokens,
        "output_tokens_per_second": num_tokens / seconds,
        "equal_to_fp32": sum(own == known for own, known in zip(outputs, expected, strict=False)),
        "requests": len(outputs),
    }


def peak_rss_mib() -> float:
    """Of the largest process so far: this one, or a worker or an engine core that has ended below it."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024


MEASUREMENTS = {"offline": measure_offline, "queue": measure_queue, "transformers": measure_transformers}


def run_in_child(name: str, model: str, dtype: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", name, "--model", model, "--dtype", dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder [default: the default model, fetched]")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--runs", type=int, default=3, help="of engine and queue each; medians are reported")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = args.model or str(default_model.fetch(args.dtype))
    if args.measure:
        figures = MEASUREMENTS[args.measure](model, args.dtype)
        print(json.dumps(figures | {"peak_rss_mib": peak_rss_mib()}))
        return
    console = Console(stderr=True)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in MEASUREMENTS}
    for number in range(args.runs):
        for name in ("offline", "queue"):
            with console.status(f"{name}, run {number + 1} of {args.runs}"):
                runs[name].append(run_in_child(name, model, args.dtype))
    with console.status("transformers, one request at a time"):
        runs["transformers"].append(run_in_child("transformers", model, args.dtype))
    report(runs, args.dtype)
    if args.json:
        Path(args.json).write_text(json.dumps({"dtype": args.dtype, "cores": os.cpu_count(), "runs": runs}, indent=1))


def report(runs: dict[str, list[dict[str, Any]]], dtype: str) -> None:
    speed = {
        name: statistics.median(run["output_tokens_per_second"] for run in measured) for name, measured in runs.items()
    }
    table = Table(title=f"{dtype}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", title_justify="left")
    for column in ("", "output tokens/s", "runs", "equal to float32", "peak RSS MiB"):
        table.add_column(column, justify="left" if not column else "right")
    for name, title in (
        ("offline", "engine alone (LLM.generate)"),
        ("queue", "through Celery and Redis, streamed"),
        ("transformers", "transformers.generate, one at a time"),
    ):
        each = " ".join(f"{run['output_tokens_per_second']:.0f}" for run in runs[name])
        equal = min(run["equal_to_fp32"] for run in runs[name])
        peak = max(run["peak_rss_mib"] for run in runs[name])
        table.add_row(title, f"{speed[name]:.1f}", each, f"{equal} of {runs[name][0]['requests']}", f"{peak:.0f}")
    Console().print(table)
    latency = runs["queue"][-1]["latency"]
    print(f"queue / engine          {speed['queue'] / speed['offline']:.3f}")
    print(f"engine / transformers   {speed['offline'] / speed['transformers']:.1f}")
    print(f"queue: TTFT p50 {1000 * latency['ttft_p50']:.0f} ms, ITL p50 {1000 * latency['itl_p50']:.0f} ms")


if __name__ == "__main__":
    main()
