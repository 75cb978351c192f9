"""One measurement of Headrace's engine for `beside_llamacpp.py`, in its own process. Prints its figures as JSON.

    python benchmarks/gguf_turn.py one|batch|prompt COUNT FILE [--dtype float32]

`one` generates COUNT tokens. `batch` generates tokens of COUNT requests at once. `prompt` computes COUNT tokens.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import psutil

PROMPT_TOKENS = 32
"""Of each request of a batch."""
NEW_TOKENS = 32
"""Of each request of a batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("one", "batch", "prompt"))
    parser.add_argument("count", type=int)
    parser.add_argument("file")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    from headrace_engine import LLM

    longest = {"one": args.count, "batch": PROMPT_TOKENS + NEW_TOKENS, "prompt": args.count}[args.kind] + 16
    llm = LLM(
        args.file,
        dtype=args.dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_seqs=args.count if args.kind == "batch" else 1,
    )
    ready = time.time() - psutil.Process().create_time()
    _generate(llm, 1, 8, 2)  # touch everything once
    measure = {"one": _one, "batch": _batch, "prompt": _prompt}[args.kind]
    print(json.dumps(measure(llm, args.count) | {"ready_seconds": ready}))


def _one(llm: Any, count: int) -> dict[str, float]:
    return {"tokens_per_second": count / _generate(llm, 1, 1, count)}


def _prompt(llm: Any, count: int) -> dict[str, float]:
    return {"tokens_per_second": count / _generate(llm, 1, count, 1)}


def _batch(llm: Any, count: int) -> dict[str, float]:
    """Measure the steps in which all requests decode, and the whole."""
    from headrace_engine.core.engine_core import EngineCore

    ends: list[tuple[float, bool]] = []
    step: Callable[[EngineCore], Any] = EngineCore.step

    def timed(core: EngineCore) -> Any:
        outputs = step(core)
        ends.append((time.perf_counter(), outputs.stats.num_tokens == count == outputs.stats.num_requests))
        return outputs

    EngineCore.step = timed  # type: ignore[assignment,method-assign]
    seconds = _generate(llm, count, PROMPT_TOKENS, NEW_TOKENS)
    decoded = [after - before for (before, _), (after, all_decode) in itertools.pairwise(ends) if all_decode]
    return {
        "tokens_per_second": count * len(decoded) / sum(decoded),
        "with_prompts": count * NEW_TOKENS / seconds,
    }


def _generate(llm: Any, requests: int, prompt: int, new: int) -> float:
    from headrace_engine import SamplingParams

    prompts = [[(7 * row + 3 * position) % 1000 + 300 for position in range(prompt)] for row in range(requests)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=new)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == new for output in outputs)
    return seconds


if __name__ == "__main__":
    main()
