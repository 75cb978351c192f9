"""The requests of the harness: everything whose continuation depends on the past, each with one right answer."""

from dataclasses import dataclass
from typing import Any

TOKENS = 400


@dataclass(frozen=True)
class Kind:
    """A request that gives the same tokens whenever it is sent."""

    name: str
    prompt: str
    params: dict[str, Any]

    @property
    def body(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "sampling_params": self.params}


def kinds() -> list[Kind]:
    """24 requests: greedy, seeded with log-probabilities and penalties, stop strings that straddle, early ends."""
    return [Kind(*_kind(number)) for number in range(24)]


def _kind(number: int) -> tuple[str, str, dict[str, Any]]:
    prompt = f"The wheel turns {number} times, " * (1 + number % 5)
    base: dict[str, Any] = {"max_tokens": TOKENS - 10 * number, "ignore_eos": True, "seed": number}
    match number % 4:
        case 0:
            return "greedy", prompt, {**base, "temperature": 0.0}
        case 1:
            penalties = {"presence_penalty": 0.5, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
            return "penalties", prompt, {**base, **penalties, "temperature": 0.9, "top_p": 0.9, "logprobs": 2}
        case 2:
            # never met, so that text is held back at all times
            stop = ["the mill wheel that never turned", "zzzzzzz"]
            return "choices", prompt, {**base, "temperature": 0.9, "n": 2, "stop": stop}
        case _:
            stop = ["ee", "th", "q"]
            return "early stop", prompt, {**base, "temperature": 1.0, "n": 2, "stop": stop, "min_tokens": 5 * number}
