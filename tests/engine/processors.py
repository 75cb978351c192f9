"""Logits processors as a user would write them, where the engine's child process can import them, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace_engine import LogitsProcessor, SamplingParams


class OnlyEven(LogitsProcessor):
    """Even tokens alone, for requests that ask."""

    extra_args = ("only_even",)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get("only_even", False), bool):
            raise ValueError("only_even must be true or false")

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        if not (params.extra_args or {}).get("only_even"):
            return None

        def process(output_token_ids: Any, logits: torch.Tensor) -> torch.Tensor:
            logits[1::2] = float("-inf")
            return logits

        return process


class CountUp(LogitsProcessor):
    """Forces the number of tokens seen so far, prompt and output, plus a start: a function of all its arguments."""

    extra_args = ("count_from",)

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        start = (params.extra_args or {}).get("count_from")
        if start is None:
            return None

        def process(prompt_token_ids: Any, output_token_ids: Any, logits: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(logits, float("-inf"))
            forced[start + len(prompt_token_ids) + len(output_token_ids)] = float("inf")
            return forced

        return process


class Fails(LogitsProcessor):
    extra_args = ("fail",)

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        how = (params.extra_args or {}).get("fail")
        if how == "early":
            raise RuntimeError(f"no processor for {params.seed}")
        return {"late": lambda _, logits: 1 / 0, "shape": lambda _, logits: logits[:3]}.get(how or "")


class NotAProcessor:
    pass
