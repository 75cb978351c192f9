"""Headrace's engine and vLLM in turns on random models of several families with about equally many bytes.

    python benchmarks/families.py --vllm PYTHON [--families llama gemma3 ...] [--dtype float32] [--one-core]

For each family it shows the output tokens per second with 1 request and with 16, and the prompt tokens per second of a
prompt of 512 tokens, as medians of all turns, and the ratio of both engines. The weights are random and written again,
so no text is compared. Without `--vllm`, it shows Headrace alone. vLLM runs eagerly, on all cores. On a busy machine,
`--one-core` gives each engine one thread and counts processor seconds instead of seconds.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

_LENGTH = 64
_PROMPT = 512
_WORKLOADS = {"1 request": (1, _LENGTH, 32), "16 requests": (16, _LENGTH, 32), "prompt of 512": (1, _PROMPT, 1)}
"""Requests, tokens of each prompt, tokens of each output."""

_COMMON: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 32, "num_local_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 192}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 512, "query_pre_attn_scalar": 64}),
    "phi3": ("phi3", {"original_max_position_embeddings": 2048}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"residual_multiplier": 0.22, "attention_multiplier": 0.015625, "logits_scaling": 8.0}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "decoder_sparse_step": 1}),
}
"""Model types of transformers, and how their configuration differs from the common shape."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="the Python that has it installed")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one-core", action="store_true", help="one thread, and processor seconds")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--answer", choices=("headrace", "vllm"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        answer(args.answer, args.model, args.dtype)
        return
    compare(args)


def answer(engine: str, model: str, dtype: str) -> None:
    """Run in the process of an engine: for each workload that a line of standard input names, print its figures."""
    options: dict[str, Any] = {"dtype": dtype, "max_num_seqs": 16, "skip_tokenizer_init": True, "max_model_len": 1024}
    if engine == "vllm":
        from vllm import LLM, SamplingParams

        options["enforce_eager"] = True
    else:
        from headrace_engine import LLM, SamplingParams  # type: ignore[assignment]
    llm: Any = LLM(model, enable_prefix_caching=False, max_num_batched_tokens=2048, **options)
    for line in sys.stdin:
        requests, length, outputs = _WORKLOADS[line.strip()]
        draw = random.Random(7)
        prompts = [{"prompt_token_ids": [draw.randrange(3, 32_000) for _ in range(length)]} for _ in range(requests)]
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        started, used = time.perf_counter(), processor_seconds()
        llm.generate(prompts, params, use_tqdm=False)
        figures = {"seconds": time.perf_counter() - started, "processor_seconds": processor_seconds() - used}
        print(json.dumps(figures), flush=True)


def processor_seconds() -> float:
    """Return what this process and its children have used until now."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def compare(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    import command_line
    import runs

    for number in (signal.SIGTERM, signal.SIGHUP):  # else a stopped engine would stay alive
        signal.signal(number, lambda *_: sys.exit(1))
    shown = "vLLM, Headrace, ratio" if args.vllm else "Headrace"
    title = f"{args.dtype}{', one core' if args.one_core else ''}, tokens/s: {shown}"
    table = Table(title=title, title_justify="left")
    for column in ("family", *_WORKLOADS):
        table.add_column(column)
    figures: dict[str, Any] = {}
    unit = "processor_seconds" if args.one_core else "seconds"
    for family in args.families:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            write_model(family, Path(folder))
            pythons = {"vllm": args.vllm, "headrace": sys.executable} if args.vllm else {"headrace": sys.executable}
            engines = {}
            for name, python in pythons.items():
                command = [python, __file__, "--answer", name, "--model", folder, "--dtype", args.dtype]
                env = command_line.vllm_env(python) if name == "vllm" else {}
                if args.one_core:
                    env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
                engines[name] = stack.enter_context(runs.Loaded(command, env))
                for workload in _WORKLOADS:
                    engines[name].ask(workload)
            figures[family] = {workload: {name: [] for name in engines} for workload in _WORKLOADS}
            for workload, own in figures[family].items():
                for turn in range(args.turns):
                    for name in sorted(engines, reverse=turn % 2 == 0):  # each goes first in turn
                        own[name].append(engines[name].ask(workload)[unit])
        table.add_row(family, *(cell(workload, own) for workload, own in figures[family].items()))
        Console().print(table)
    if args.json:
        Path(args.json).write_text(json.dumps({"dtype": args.dtype, "seconds": figures}))


def cell(workload: str, seconds: dict[str, list[float]]) -> str:
    """Return the tokens per second of each engine, and Headrace's divided by vLLM's."""
    import statistics

    requests, length, outputs = _WORKLOADS[workload]
    tokens = requests * outputs if outputs > 1 else length
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    speeds = " ".join(f"{tokens / median:.1f}" for median in medians.values())
    return f"{speeds}  {medians['vllm'] / medians['headrace']:.2f}" if "vllm" in medians else speeds


def write_model(family: str, folder: Path) -> None:
    """Save a random model of a family."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model_type, options = FAMILIES[family]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**_COMMON, **options})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
