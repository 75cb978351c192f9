"""Measures the perplexity of a GGUF file by each driver, on the prompts of the benchmark.

    python -m engine.gguf_perplexity FILE

Run it in the folder `tests`. As in `llama-perplexity -c 512`, the text is cut into chunks of 512 tokens, and the tokens
of their second halves count. Rounding changes the log-probability of each token. Half the variance of the change is the
expected loss: few tokens tell it, while the difference of two perplexities needs many.
"""

from __future__ import annotations

import argparse
import json
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import numpy as np

from engine.perplexity import WORKLOAD
from headrace_engine import LLM, SamplingParams
from headrace_engine.runner.linear import grouped_linear
from headrace_engine.runner.linear.grouped_linear import GroupedLinear
from headrace_engine.runner.linear.native_linear import LinearArgs

_CHUNK = 512
_INTEGERS = 1  # in linear.h
Array = np.ndarray[Any, np.dtype[np.float64]]


def log_probabilities(file: str, dtype: str, chunks: int) -> Array:
    """Return those of the tokens in the second halves of the first chunks."""
    llm = LLM(file, dtype=dtype, max_model_len=_CHUNK + 8, max_num_seqs=1, enable_prefix_caching=False)
    text = "\n\n".join(json.loads(line)["prompt"] for line in WORKLOAD.read_text().splitlines())
    tokens = llm.get_tokenizer().encode(text)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    found = []
    for first in range(0, len(tokens) - _CHUNK + 1, _CHUNK)[:chunks]:
        chunk = tokens[first : first + _CHUNK]
        (output,) = llm.generate([{"prompt_token_ids": chunk}], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        for token, entries in zip(chunk[_CHUNK // 2 + 1 :], output.prompt_logprobs[_CHUNK // 2 + 1 :], strict=True):
            assert entries is not None
            found.append(entries[token].logprob)
    return np.array(found)


def integers_in_any_type() -> AbstractContextManager[Any]:
    """Let float32 runs multiply by integers, too: then nothing else is rounded."""
    make = GroupedLinear._make_args

    def by_integers(layer: GroupedLinear) -> LinearArgs:
        args = make(layer)
        args.driver = _INTEGERS
        return args

    return mock.patch.object(GroupedLinear, "_make_args", by_integers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--chunks", type=int, default=18)
    options = parser.parse_args()
    drivers: dict[str, tuple[str, AbstractContextManager[Any]]] = {
        "float32": ("float32", nullcontext()),
        "bfloat16, dequantised": ("bfloat16", mock.patch.object(grouped_linear, "supported", return_value=False)),
        "float32 by integers": ("float32", integers_in_any_type()),
        "bfloat16 by integers": ("bfloat16", nullcontext()),
    }
    exact: Array | None = None
    for name, (dtype, patch) in drivers.items():
        with patch:
            found = log_probabilities(options.file, dtype, options.chunks)
        exact = found if exact is None else exact
        change = found - exact
        loss, error = math.expm1(-change.mean()), change.std() / math.sqrt(len(change))
        print(  # noqa: T201
            f"{name:22} perplexity {math.exp(-found.mean()):.3f}, {100 * loss:+.2f} % (standard error "
            f"{100 * error:.2f}), expected {50 * change.var():.2f} %, of {len(found)} tokens",
            flush=True,
        )


if __name__ == "__main__":
    main()
