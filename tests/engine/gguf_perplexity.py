"""Measures the perplexity of a GGUF file by each driver, on the prompts of the benchmark.

    python -m engine.gguf_perplexity FILE [--llamacpp PROGRAMS [--types Q4_0 Q4_K_M]]

Run it in the folder `tests`. As in `llama-perplexity -c 512`, the text is cut into chunks of 512 tokens, and the tokens
of their second halves count. Rounding changes the log-probability of each token. Half the variance of the change is the
expected loss: few tokens tell it, while the difference of two perplexities needs many.

With PROGRAMS, the folder of llama.cpp's programs, llama.cpp measures the same tokens: with the file as it is, and with
the file dequantised to float32. With types, FILE is only the source that is quantised to each of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from engine import llamacpp
from engine.perplexity import WORKLOAD
from headrace_engine import LLM, SamplingParams
from headrace_engine.runner.linear import grouped_linear
from headrace_engine.runner.linear.grouped_linear import GroupedLinear
from headrace_engine.runner.linear.native_linear import LinearArgs

_CHUNK = 512
_INTEGERS = 1  # in linear.h
Array = np.ndarray[Any, np.dtype[np.float64]]


class Measured(NamedTuple):
    name: str
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    log_probabilities: Array
    perplexity: float


def text() -> str:
    return "\n\n".join(json.loads(line)["prompt"] for line in WORKLOAD.read_text().splitlines())


def measure(name: str, file: Path, dtype: str, chunks: int) -> Measured:
    """Return the log-probabilities of the tokens in the second halves of the first chunks."""
    llm = LLM(str(file), dtype=dtype, max_model_len=_CHUNK + 8, max_num_seqs=1, enable_prefix_caching=False)
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(text())
    tokens = np.array(ids[: len(ids) // _CHUNK * _CHUNK], np.int32).reshape(-1, _CHUNK)[:chunks]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    found = []
    for chunk in tokens.tolist():
        if ids[0] == tokenizer.bos_token_id:  # llama-perplexity begins each chunk with it
            chunk[0] = ids[0]
        (output,) = llm.generate([{"prompt_token_ids": chunk}], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        for token, entries in zip(chunk[_CHUNK // 2 + 1 :], output.prompt_logprobs[_CHUNK // 2 + 1 :], strict=True):
            assert entries is not None
            found.append(entries[token].logprob)
    return Measured(name, tokens, np.array(found), math.exp(-np.mean(found)))


def integers_in_any_type() -> AbstractContextManager[Any]:
    """Let float32 runs multiply by integers, too: then nothing else is rounded."""
    make = GroupedLinear._make_args

    def by_integers(layer: GroupedLinear) -> LinearArgs:
        args = make(layer)
        args.driver = _INTEGERS
        return args

    return mock.patch.object(GroupedLinear, "_make_args", by_integers)


def measure_drivers(file: Path, chunks: int) -> Iterator[Measured]:
    drivers: dict[str, tuple[str, AbstractContextManager[Any]]] = {
        "float32": ("float32", nullcontext()),
        "bfloat16, dequantised": ("bfloat16", mock.patch.object(grouped_linear, "supported", return_value=False)),
        "float32 by integers": ("float32", integers_in_any_type()),
        "bfloat16 by integers": ("bfloat16", nullcontext()),
    }
    for name, (dtype, patch) in drivers.items():
        with patch:
            yield measure(name, file, dtype, chunks)


def measure_llamacpp(programs: Path, file: Path, chunks: int) -> Iterator[Measured]:
    yield Measured("llama.cpp", *llamacpp.perplexity(programs, file, text(), _CHUNK, chunks, ()))
    with tempfile.TemporaryDirectory() as folder:
        dequantised = Path(folder) / "dequantised.gguf"
        llamacpp.quantise(programs, file, dequantised, "F32")
        found = llamacpp.perplexity(programs, dequantised, text(), _CHUNK, chunks, llamacpp.EXACT)
    yield Measured("llama.cpp, dequantised", *found)


def report(file: Path, programs: Path | None, chunks: int) -> None:
    exact: Measured | None = None
    others = measure_llamacpp(programs, file, chunks) if programs else ()
    for found in itertools.chain(measure_drivers(file, chunks), others):
        exact = exact or found
        assert np.array_equal(found.tokens, exact.tokens), f"{found.name} has other tokens"
        change = found.log_probabilities - exact.log_probabilities
        loss, error = found.perplexity / exact.perplexity - 1, change.std() / math.sqrt(len(change))
        print(  # noqa: T201
            f"{file.name:24} {found.name:22} perplexity {found.perplexity:.3f}, {100 * loss:+.2f} % (standard error "
            f"{100 * error:.2f}), expected {50 * change.var():.2f} %, of {len(change)} tokens",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llamacpp", type=Path, metavar="PROGRAMS")
    parser.add_argument("--types", nargs="*", default=[], help="of llama-quantize")
    parser.add_argument("--chunks", type=int, default=18)
    options = parser.parse_args()
    if options.types and not options.llamacpp:
        parser.error("--types needs --llamacpp")
    if not options.types:
        report(options.file, options.llamacpp, options.chunks)
    for kind in options.types:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{kind}.gguf"
            llamacpp.quantise(options.llamacpp, options.file, file, kind)
            report(file, options.llamacpp, options.chunks)


if __name__ == "__main__":
    main()
