"""The benchmark's requests: 64 prompts of log-normal length with forced output lengths, greedy.

`workload.jsonl` holds prompts from licence texts and Python's documentation with SmolLM2's token ids;
`expected_fp32.json` the output ids in float32, on which transformers and two other engines agree for all 64.
"""

import json
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


def load() -> list[BenchmarkRequest]:
    lines = (_FOLDER / "workload.jsonl").read_text().splitlines()
    return [BenchmarkRequest(row["prompt_token_ids"], row["max_tokens"]) for row in map(json.loads, lines)]


def expected_fp32() -> list[list[int]]:
    expected: list[list[int]] = json.loads((_FOLDER / "expected_fp32.json").read_text())
    return expected
