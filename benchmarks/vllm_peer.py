"""vLLM on the same requests. Runs with the Python of an environment that has vLLM, not with that of Headrace:

PATH_TO_VLLM/bin/python benchmarks/vllm_peer.py offline|turns|poisson|single --model FOLDER --dtype float32
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

import workload
from headrace_cli.demo.stream_timing import StreamTiming, summarise


def offline(options: dict[str, Any], requests: list[workload.BenchmarkRequest], prefix_caching: bool) -> dict[str, Any]:
    begun = time.perf_counter()
    llm = LLM(**options, enable_prefix_caching=prefix_caching)
    ready = time.perf_counter()
    return generate(llm, requests) | {"startup_seconds": ready - begun}


def turns(options: dict[str, Any]) -> dict[str, Any]:
    """Measure as `turns` of `measurements.py` does."""
    llm = LLM(**options, enable_prefix_caching=False)
    for line in sys.stdin:
        print(json.dumps(generate(llm, workload.load(line.strip()))), flush=True)
    return {}


def generate(llm: LLM, requests: list[workload.BenchmarkRequest]) -> dict[str, Any]:
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)
    started = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": request.prompt_token_ids} for request in requests],
        [SamplingParams(**request.sampling_params) for request in requests],
        use_tqdm=False,
    )
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"seconds": seconds, "output_tokens": num_tokens, "output_tokens_per_second": num_tokens / seconds}


async def streamed(
    options: dict[str, Any], requests: list[workload.BenchmarkRequest], delays: list[float]
) -> dict[str, Any]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options, enable_prefix_caching=False))

    async def one(name: str, request: workload.BenchmarkRequest, delay: float) -> StreamTiming:
        await asyncio.sleep(delay)
        timing = StreamTiming(time.perf_counter())
        params = SamplingParams(**request.sampling_params, output_kind=RequestOutputKind.DELTA)
        async for output in engine.generate({"prompt_token_ids": request.prompt_token_ids}, params, request_id=name):
            timing.arrived(time.perf_counter(), len(output.outputs[0].token_ids))
        return timing

    await one("warm", workload.BenchmarkRequest([1, 2, 3], 8), 0.0)
    timings = await asyncio.gather(
        *(one(f"r{i}", request, delay) for i, (request, delay) in enumerate(zip(requests, delays, strict=True)))
    )
    engine.shutdown()
    return summarise(timings)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("offline", "turns", "poisson", "single"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--workload", nargs="+", default=["mixed"], help="one, or all that `turns` is asked for")
    parser.add_argument("--rate", type=float, default=2.6)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more of vLLM's options, as JSON")
    args = parser.parse_args()
    served = [workload.load(name) for name in args.workload]
    requests = served[0]
    longest = max(len(each.prompt_token_ids) + each.max_tokens for each in itertools.chain(*served))
    options: dict[str, Any] = {
        "model": args.model,
        "dtype": args.dtype,
        "max_model_len": max(1024, longest),
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        **args.engine_args,
    }
    if args.kind == "offline":
        figures = offline(options, requests, args.workload == ["shared-prefixes"])
    elif args.kind == "turns":
        figures = turns(options)
    elif args.kind == "poisson":
        figures = asyncio.run(streamed(options, requests, workload.arrivals(len(requests), args.rate)))
    else:
        figures = asyncio.run(streamed(options, [workload.BenchmarkRequest([1, 2, 3, 4] * 8, 128)], [0.0]))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
