"""The speed of one GPU, compared with the limit of its memory and with transformers' own continuous batching.

    python benchmarks/gpu.py [--models llama-3.1-8b,qwen3-0.6b] [--json FILE]

The shapes are those of the named models and the weights are random, so nothing is downloaded. Each measurement runs in
its own process. If one fails, it reports why, and the others continue. A run should take about ten minutes on an H200;
this is an estimate. `--device cpu --models tiny` runs every line on the CPU, to check the script itself.

The roofline is the least possible time. Each step reads all weights and all K/V of the running requests, at the
bandwidth that the first measurement finds. The prompts' matrix products run at the rate that it finds.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, Callable[[], Any]] = {
    "llama-3.1-8b": lambda: transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters=LLAMA_3_ROPE,
        tie_word_embeddings=False,
    ),
    "qwen3-0.6b": lambda: transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
    ),
    "tiny": lambda: transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    ),
}


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements. Those of the CPU are small: it only checks the script."""

    batch_1_tokens: int
    num_seqs: int
    shortest: int
    longest: int
    peer_seqs: int
    peer_tokens: int
    max_num_batched_tokens: int
    copied_bytes: int
    product_size: int


SCALES = {
    "cuda": Scale(256, 256, 100, 1024, 128, 128, 8192, 8 << 30, 8192),
    "cpu": Scale(4, 6, 3, 12, 2, 2, 64, 1 << 24, 256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SCALES, default="cuda")
    parser.add_argument("--models", default="llama-3.1-8b,qwen3-0.6b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, argument = args.measure
        print(json.dumps(MEASUREMENTS[name](args.device, argument)))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; --device cpu --models tiny checks this script without one")
    figures: dict[str, Any] = {"machine": run_in_child("machine", args.device, "")}
    report(figures["machine"])
    for model in args.models.split(","):
        folder = tempfile.mkdtemp(dir=shared_memory())
        try:
            own = figures[model] = {"model": run_in_child("make_model", args.device, f"{model}:{folder}")}
            for name in ("attention", "batch_1", "many", "ahead", "peer"):
                own[name] = run_in_child(name, args.device, folder)
            if not any("error" in own[name] for name in own) and "error" not in figures["machine"]:
                own["roofline"] = rooflines(figures["machine"], own, SCALES[args.device])
        finally:
            shutil.rmtree(folder)
        for name, found in own.items():
            report({f"{model} {name} {key}": value for key, value in found.items()})
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


def run_in_child(name: str, device: str, argument: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--device", device, "--measure", name, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
        return {"error": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        print(f"{name:44} {value:.4g}" if isinstance(value, float) else f"{name:44} {value}", flush=True)


def shared_memory() -> str | None:
    """Return the folder in which 16 GB of weights are written fastest; None: the default one."""
    place = Path("/dev/shm")
    return str(place) if place.is_dir() and shutil.disk_usage(place).free > 24 << 30 else None


def machine(device: str, _: str) -> dict[str, Any]:
    """Measure the bytes per second of a copy (reads plus writes), and the operations per second of a product."""
    scale = SCALES[device]
    source = torch.empty(scale.copied_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source), device)
    left, right = (
        torch.randn(scale.product_size, scale.product_size, device=device).to(torch.bfloat16) for _ in range(2)
    )
    product = timed(lambda: left @ right, device)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {
        "device": f"{name}, torch {torch.__version__}, transformers {transformers.__version__}",
        "bytes_per_second": 2 * source.nbytes / copy,
        "operations_per_second": 2 * scale.product_size**3 / product,
    }


def timed(call: Callable[[], Any], device: str, repeats: int = 20) -> float:
    """Return the seconds of one call, as the median of several."""
    for _ in range(3):
        call()
    seconds = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def make_model(device: str, argument: str) -> dict[str, Any]:
    name, _, folder = argument.partition(":")
    config = SHAPES[name]()
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    read = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:
        read -= config.vocab_size * config.hidden_size  # a step reads only the embedding rows of its tokens
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "weight_bytes_read_a_step": 2 * read,
        "kv_bytes_a_token": 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim,
        "parameters_in_products": read,
    }


def attention(device: str, folder: str) -> dict[str, Any]:
    """Measure the kernel of one layer: microseconds and, for decoding, the bytes of K/V that it reads per second."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from headrace_engine.runner.attention.backend import AttentionMetadata, AttentionSpec, LayerSpec
    from headrace_engine.runner.attention.triton_backend import TritonBackend

    config = transformers.AutoConfig.from_pretrained(folder)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, k_dim=dim, v_dim=dim)
    size = 32
    backend = TritonBackend(AttentionSpec(layers=(layer,), block_size=size, dtype=torch.bfloat16), torch.device(device))
    found = {}
    cases = [(1, 1, 1024), (1, 1, 8192), (32, 1, 1024), (32, 1, 8192), (256, 1, 1024), (1, 8192, 8192), (8, 1024, 1024)]
    for num_seqs, new, length in cases if device == "cuda" else [(2, 1, 40), (1, 9, 9)]:
        blocks = length // size + 1
        backend.allocate(1 + num_seqs * blocks)
        for cache in (*backend._k_cache, *backend._v_cache):
            cache.normal_()
        places = torch.arange(num_seqs * blocks, device=device, dtype=torch.int32).view(num_seqs, blocks) + 1
        positions = torch.arange(length - new, length, device=device)
        metadata = AttentionMetadata(
            query_start=torch.arange(num_seqs + 1, device=device, dtype=torch.int32) * new,
            seq_lens=torch.full((num_seqs,), length, device=device, dtype=torch.int32),
            table_rows=torch.arange(num_seqs, device=device, dtype=torch.int32),
            block_table=places,
            slot_mapping=(places.long()[:, positions // size] * size + positions % size).flatten(),
            max_query_len=new,
        )
        query, key, value = (
            torch.randn(num_seqs * new, count, dim, device=device).to(torch.bfloat16)
            for count in (heads, kv_heads, kv_heads)
        )

        def call(q: Any = query, k: Any = key, v: Any = value, where: Any = metadata) -> Any:
            return backend.forward(0, q, k, v, where, scale=dim**-0.5, softcap=None, sinks=None)

        seconds = in_graph(call) if device == "cuda" else timed(call, device, 1)
        label = f"{num_seqs}x{new} at {length}"
        found[f"{label} us"] = 1e6 * seconds
        if new == 1:
            found[f"{label} bytes/s"] = num_seqs * length * kv_heads * dim * 4 / seconds
        else:
            found[f"{label} operations/s"] = 2 * num_seqs * heads * dim * new * length / seconds
    return found


def in_graph(call: Callable[[], Any], launches: int = 20) -> float:
    """Return the seconds of one call among several in a CUDA graph, without the cost of launches."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    return timed(graph.replay, "cuda") / launches


class Engine:
    """An engine core on the GPU's runner. This script adds requests and calls each step, and records its time."""

    def __init__(
        self, device: str, folder: str, max_num_seqs: int, max_model_len: int, *, async_scheduling: bool = False
    ) -> None:
        from headrace_engine.core.engine_core import EngineCore
        from headrace_engine.options.engine_args import EngineArgs
        from headrace_engine.runner.cuda.runner import CUDARunner

        started = time.perf_counter()
        config = EngineArgs(
            model=folder,
            device=device,
            dtype="bfloat16",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=SCALES[device].max_num_batched_tokens,
            max_model_len=max_model_len,
            num_blocks=None if device == "cuda" else 64,
            enable_prefix_caching=False,
        ).create_engine_config()
        config.scheduler.async_scheduling = async_scheduling
        self.core = EngineCore(config, CUDARunner(config, torch.device(device)))
        self.start_seconds = time.perf_counter() - started
        self.steps: list[tuple[float, int, dict[str, float]]] = []
        """Seconds, scheduled tokens and phases of each step of the last run; empty if steps are launched ahead."""

    def run(self, requests: list[tuple[list[int], int]], temperature: float) -> float:
        """Run the requests. Return the seconds until all have their tokens."""
        from headrace_engine.requests.request import EngineCoreRequest
        from headrace_engine.requests.sampling_params import SamplingParams

        runner, execute = self.core.runner, self.core.runner.execute_model
        self.steps.clear()

        def watched(batch: Any) -> Any:
            started = time.perf_counter()
            output = execute(batch)
            self.steps.append((time.perf_counter() - started, batch.num_tokens, output.phase_seconds))
            return output

        runner.execute_model = watched  # type: ignore[method-assign]
        started = time.perf_counter()
        for index, (prompt, max_tokens) in enumerate(requests):
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
            self.core.add_request(
                EngineCoreRequest(
                    request_id=str(index), prompt_token_ids=list(prompt), sampling_params=params, seed=index
                )
            )
        count = 0
        while self.core.has_work():
            count += sum(len(news.new_token_ids) for news in self.core.step().outputs)
        seconds = time.perf_counter() - started
        runner.execute_model = execute  # type: ignore[method-assign]
        assert count == sum(max_tokens for _, max_tokens in requests)
        return seconds


def batch_1(device: str, folder: str) -> dict[str, Any]:
    """Measure one request alone: tokens per second while it decodes."""
    scale = SCALES[device]
    prompt = list(range(3, 3 + scale.longest))
    engine = Engine(device, folder, 1, scale.longest + scale.batch_1_tokens)
    engine.run([(prompt, 2)], 0.0)
    engine.run([(prompt, scale.batch_1_tokens)], 0.0)
    decodes = [seconds for seconds, tokens, _ in engine.steps if tokens == 1]
    return {
        "start_seconds": engine.start_seconds,
        "step_ms": 1e3 * statistics.median(decodes),
        "tokens_per_second": len(decodes) / sum(decodes),
    }


def workload(scale: Scale) -> list[tuple[list[int], int]]:
    """Return the requests of nano-vllm's benchmark, with its lengths. Token ids fit into the smallest vocabulary."""
    draw = random.Random(0)
    prompts = [
        [3 + draw.randint(0, 10000) % 500 for _ in range(draw.randint(scale.shortest, scale.longest))]
        for _ in range(scale.num_seqs)
    ]
    return [(prompt, draw.randint(scale.shortest, scale.longest)) for prompt in prompts]


def many(device: str, folder: str) -> dict[str, Any]:
    """Measure many requests at once, greedy and sampled: output tokens per second, and the phases of a full step."""
    scale = SCALES[device]
    requests = workload(scale)
    engine = Engine(device, folder, scale.num_seqs, 2 * scale.longest + 1)
    engine.run([(prompt[:16], 4) for prompt, _ in requests], 0.6)
    found: dict[str, Any] = {"start_seconds": engine.start_seconds}
    for name, temperature in (("greedy", 0.0), ("drawn", 0.6)):
        seconds = engine.run(requests, temperature)
        found[f"{name}_seconds"] = seconds
        found[f"{name}_tokens_per_second"] = sum(max_tokens for _, max_tokens in requests) / seconds
        full = [step for step in engine.steps if step[1] == scale.num_seqs]
        if full:
            found[f"{name}_step_ms"] = 1e3 * statistics.median(step[0] for step in full)
            for phase in full[0][2]:
                found[f"{name}_{phase}_ms"] = 1e3 * statistics.median(step[2][phase] for step in full)
        found[f"{name}_outside_runner_ms_a_step"] = (
            1e3 * (seconds - sum(step[0] for step in engine.steps)) / len(engine.steps)
        )
    return found


def ahead(device: str, folder: str) -> dict[str, Any]:
    """Measure as `many`, but schedule and launch each step while the previous step is computed."""
    scale = SCALES[device]
    requests = workload(scale)
    engine = Engine(device, folder, scale.num_seqs, 2 * scale.longest + 1, async_scheduling=True)
    engine.run([(prompt[:16], 4) for prompt, _ in requests], 0.6)
    num_tokens = sum(max_tokens for _, max_tokens in requests)
    found = {}
    for name, temperature in (("greedy", 0.0), ("drawn", 0.6)):
        found[f"{name}_seconds"] = engine.run(requests, temperature)
        found[f"{name}_tokens_per_second"] = num_tokens / found[f"{name}_seconds"]
    return found


def peer(device: str, folder: str) -> dict[str, Any]:
    """Measure the same requests with transformers' `generate_batch` and the engine. All outputs are equally long."""
    scale = SCALES[device]
    requests = [(prompt, scale.peer_tokens) for prompt, _ in workload(scale)[: scale.peer_seqs]]
    num_tokens = scale.peer_seqs * scale.peer_tokens
    engine = Engine(device, folder, scale.peer_seqs, 2 * scale.longest + 1)
    engine.run([(prompt[:16], 4) for prompt, _ in requests], 0.0)
    own = num_tokens / engine.run(requests, 0.0)
    del engine
    if device == "cuda":
        torch.cuda.empty_cache()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(device)
    options = transformers.GenerationConfig(
        max_new_tokens=scale.peer_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = [prompt for prompt, _ in requests]
    for _ in range(2):  # the first one warms up
        started = time.perf_counter()
        outputs = model.generate_batch(prompts, generation_config=options, progress_bar=False)
        seconds = time.perf_counter() - started
    made = sum(len(output.generated_tokens) for output in outputs.values())
    theirs = made / seconds
    return {"engine_tokens_per_second": own, "generate_batch_tokens_per_second": theirs, "ratio": own / theirs}


def rooflines(machine: dict[str, Any], own: dict[str, Any], scale: Scale) -> dict[str, Any]:
    """Return the least times that memory and products allow, and these times as shares of the measured times."""
    model, rate = own["model"], machine["bytes_per_second"]
    length = scale.longest + scale.batch_1_tokens / 2
    step = (model["weight_bytes_read_a_step"] + length * model["kv_bytes_a_token"]) / rate
    floor = floor_seconds(workload(scale), model, machine)
    return {
        "batch_1_floor_ms": 1e3 * step,
        "batch_1_share": 1e3 * step / own["batch_1"]["step_ms"],
        "many_floor_seconds": floor,
        "many_greedy_share": floor / own["many"]["greedy_seconds"],
        "many_drawn_share": floor / own["many"]["drawn_seconds"],
        "ahead_greedy_share": floor / own["ahead"]["greedy_seconds"],
        "ahead_drawn_share": floor / own["ahead"]["drawn_seconds"],
    }


def floor_seconds(requests: list[tuple[list[int], int]], model: dict[str, Any], machine: dict[str, Any]) -> float:
    """Return the least seconds: all prompts at once, then one step per token while any request needs more."""
    operations = 2 * model["parameters_in_products"] * sum(len(prompt) for prompt, _ in requests)
    seconds = operations / machine["operations_per_second"]
    for step in range(1, max(max_tokens for _, max_tokens in requests)):
        lengths = [len(prompt) + step for prompt, max_tokens in requests if max_tokens > step]
        bytes_read = model["weight_bytes_read_a_step"] + sum(lengths) * model["kv_bytes_a_token"]
        seconds += bytes_read / machine["bytes_per_second"]
    return float(seconds)


MEASUREMENTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "machine": machine,
    "make_model": make_model,
    "attention": attention,
    "batch_1": batch_1,
    "many": many,
    "ahead": ahead,
    "peer": peer,
}

if __name__ == "__main__":
    main()
