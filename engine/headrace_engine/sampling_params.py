"""SamplingParams: what a request may ask of the sampler, with vLLM's names and defaults.

Values are checked when the object is made, and every problem is reported at once. Checks that need the model
(vocabulary size, context length) are made by the input processor.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

from headrace_engine.errors import InvalidRequestError

MAX_N = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
# Below this temperature float32 softmax is a one-hot up to rounding: take the arg max outright.
GREEDY_TEMPERATURE = 1e-5


class RequestOutputKind(Enum):
    """What each `RequestOutput` of a stream holds."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How tokens of one request are chosen and when it ends.

    Raises:
        InvalidRequestError: one or more values are out of range; all of them are named.
    """

    n: int = 1
    """Number of independent choices generated for the prompt."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that was generated at least once (-2 to 2)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was generated (-2 to 2)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (above 0, at most 2)."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps all tokens."""
    min_p: float = 0.0
    """Drops tokens less likely than this share of the most likely one's probability."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch. None draws one when the request is accepted."""
    stop: list[str] = field(default_factory=list)
    """Generation ends before the first of these strings; one string may be given alone."""
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """Most tokens to generate; None means as many as the context allows."""
    min_tokens: int = 0
    """No end-of-sequence or stop token can be drawn before this many tokens."""
    logprobs: int | None = None
    """Log-probabilities returned for each generated token beside its own (0 to 20)."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):
            self.stop = [stop]
        elif stop is None:
            self.stop = []
        stop_token_ids: object = self.stop_token_ids
        if stop_token_ids is None:
            self.stop_token_ids = []
        if self.top_k == -1:
            self.top_k = 0
        problems = list(self._problems())
        if problems:
            raise InvalidRequestError(problems)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from a plain map such as a decoded message; unknown names are refused by name."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(str(name) for name in values if name not in known)
        if unknown:
            raise InvalidRequestError([f"sampling parameter {name!r} is not known" for name in unknown])
        kind = values.get("output_kind", RequestOutputKind.CUMULATIVE)
        try:
            kind = RequestOutputKind(kind)
        except ValueError:
            raise InvalidRequestError(f"output_kind is {kind!r}, allowed are cumulative, delta, final_only") from None
        return cls(**{**values, "output_kind": kind})

    def to_dict(self) -> dict[str, Any]:
        """The plain map that `from_dict` reads."""
        return {**asdict(self), "output_kind": self.output_kind.value}

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def _problems(self) -> "list[str]":
        problems = [
            *_number("temperature", self.temperature, 0.0, math.inf),
            *_number("top_p", self.top_p, 0.0, 1.0, above=True),
            *_number("min_p", self.min_p, 0.0, 1.0),
            *_number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            *_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            *_number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, above=True),
            *_integer("n", self.n, 1, MAX_N),
            *_integer("top_k", self.top_k, 0, None),
            *_integer("min_tokens", self.min_tokens, 0, None),
        ]
        if self.max_tokens is not None:
            problems += _integer("max_tokens", self.max_tokens, 1, None)
        if self.logprobs is not None:
            problems += _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            problems += _integer("seed", self.seed, -(2**63), 2**63 - 1)
        flags = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
        problems += [
            f"{name} is {getattr(self, name)!r}, expected true or false"
            for name in flags
            if not isinstance(getattr(self, name), bool)
        ]
        problems += self._stop_problems()
        if not problems:
            if self.max_tokens is not None and self.min_tokens > self.max_tokens:
                problems.append(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")
            if self.n > 1 and self.is_greedy:
                problems.append(
                    f"n is {self.n} but temperature is 0: all choices would be the same; set n=1 or a temperature"
                )
        return problems

    def _stop_problems(self) -> "list[str]":
        problems: list[str] = []
        if not isinstance(self.stop, list) or not all(isinstance(s, str) for s in self.stop):
            problems.append("stop must be a string or a list of strings")
        else:
            if len(self.stop) > MAX_STOP_STRINGS:
                problems.append(f"stop holds {len(self.stop)} strings, the limit is {MAX_STOP_STRINGS}")
            if any(not 1 <= len(s) <= MAX_STOP_STRING_CHARS for s in self.stop):
                problems.append(f"every stop string must have 1 to {MAX_STOP_STRING_CHARS} characters")
        if not isinstance(self.stop_token_ids, list) or not all(_is_int(t) and t >= 0 for t in self.stop_token_ids):
            problems.append("stop_token_ids must be a list of token ids (integers from 0)")
        return problems


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> list[str]:
    largest = sys.float_info.max  # Python's integers go beyond it
    if not isinstance(value, int | float) or isinstance(value, bool) or not -largest <= value <= largest:
        return [f"{name} is {value!r}, expected a finite number"]
    if value < low or value > high or (above and value == low):
        least = f"above {low:g}" if above else f"at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        return [f"{name} is {value:g}, must be {least}{most}"]
    return []


def _integer(name: str, value: object, low: int, high: int | None) -> list[str]:
    if not _is_int(value):
        return [f"{name} is {value!r}, expected an integer"]
    assert isinstance(value, int)
    if value < low or (high is not None and value > high):
        return [f"{name} is {value}, must be at least {low}" + ("" if high is None else f" and at most {high}")]
    return []
