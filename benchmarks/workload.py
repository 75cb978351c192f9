"""The benchmarks' requests: prompts from licence texts and Python's documentation, forced lengths, greedy sampling.

`workload.jsonl` has 64 of them with SmolLM2's token ids and log-normal lengths. `expected_fp32.json` has their output
ids in float32, on which transformers and two other engines agree. The other workloads are cut and joined from the
tokens of these prompts.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class BenchmarkRequest:
    prompt_token_ids: list[int]
    max_tokens: int

    @property
    def sampling_params(self) -> dict[str, Any]:
        return {"temperature": 0.0, "ignore_eos": True, "max_tokens": self.max_tokens}


def load(name: str = "mixed") -> list[BenchmarkRequest]:
    """Return the workload of this name, one of `NAMES`. It is the same at every call."""
    mixed = [
        BenchmarkRequest(row["prompt_token_ids"], row["max_tokens"])
        for row in map(json.loads, (_FOLDER / "workload.jsonl").read_text().splitlines())
    ]
    if name == "mixed":
        return mixed
    tokens = [token for request in mixed for token in request.prompt_token_ids]
    return _JOINED[name](tokens, random.Random(7))


def _long_prompts(tokens: list[int], draw: random.Random) -> list[BenchmarkRequest]:
    return [BenchmarkRequest(_cut(tokens, draw, draw.randint(500, 1900)), draw.randint(8, 32)) for _ in range(16)]


def _long_outputs(tokens: list[int], draw: random.Random) -> list[BenchmarkRequest]:
    return [BenchmarkRequest(_cut(tokens, draw, draw.randint(8, 48)), draw.randint(150, 400)) for _ in range(32)]


def _shared_prefixes(tokens: list[int], draw: random.Random) -> list[BenchmarkRequest]:
    prefixes = [_cut(tokens, draw, 640) for _ in range(4)]
    return [BenchmarkRequest(draw.choice(prefixes) + _cut(tokens, draw, 32), 48) for _ in range(48)]


def _context_8k(tokens: list[int], draw: random.Random) -> list[BenchmarkRequest]:
    return [BenchmarkRequest(_cut(tokens, draw, 8000), 64) for _ in range(2)]


def _cut(tokens: list[int], draw: random.Random, length: int) -> list[int]:
    begin = draw.randrange(len(tokens) - length)
    return tokens[begin : begin + length]


_JOINED = {
    "long-prompts": _long_prompts,
    "long-outputs": _long_outputs,
    "shared-prefixes": _shared_prefixes,
    "context-8k": _context_8k,
}
NAMES = ("mixed", *_JOINED)


def arrivals(count: int, rate: float) -> list[float]:
    """Return the arrival of each request in seconds from the start: a Poisson process, the same at every call."""
    draw, now, times = random.Random(7), 0.0, []
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate)
    return times


def expected_fp32() -> list[list[int]]:
    """Return the expected output ids of the mixed workload."""
    expected: list[list[int]] = json.loads((_FOLDER / "expected_fp32.json").read_text())
    return expected
