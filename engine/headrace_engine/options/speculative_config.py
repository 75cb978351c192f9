"""The options of speculative decoding, with vLLM's names, and their checks. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

SpeculativeMethod = Literal["ngram", "draft_model"]

MAX_SPECULATIVE_TOKENS = 16
"""Limit of num_speculative_tokens. Drafts at later positions are hardly ever accepted. Each position has metrics."""
_DEFAULT_LOOKUP = 5
_MAX_LOOKUP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """The source and the length of drafts."""

    method: SpeculativeMethod
    """ngram: drafts are tokens that followed an earlier occurrence of the last tokens in the same request.
    draft_model: a smaller model generates the drafts."""
    num_speculative_tokens: int
    """Maximum number of draft tokens of a request in a step."""
    prompt_lookup_min: int = _DEFAULT_LOOKUP
    """ngram: minimum length of the n-gram."""
    prompt_lookup_max: int = _DEFAULT_LOOKUP
    """ngram: maximum length of the n-gram. The longest match is used."""
    model: str | None = None
    """draft_model: folder or hub name of a model with the same vocabulary."""

    @classmethod
    def from_map(cls, values: Mapping[str, Any]) -> "SpeculativeConfig":
        """Build from checked values (`problems`). A missing lookup bound gets the value of the other, as in vLLM."""
        known = dict(values)
        known.setdefault("prompt_lookup_min", known.get("prompt_lookup_max", _DEFAULT_LOOKUP))
        known.setdefault("prompt_lookup_max", known["prompt_lookup_min"])
        return cls(**known)

    @classmethod
    def problems(cls, values: object) -> list[str]:
        """Return all problems of a map of options. `from_map` may be called if there are none."""
        if not isinstance(values, Mapping):
            return [f"speculative_config must be a map of {_NAMES}, got {values!r}"]
        problems = [
            f"names of speculative_config must be of {_NAMES}, got {name!r}" for name in values if name not in _FIELDS
        ]
        method = values.get("method")
        methods = get_args(SpeculativeMethod)
        if method not in methods:
            problems.append(f"speculative_config.method must be one of {', '.join(methods)}, got {method!r}")
        problems += _wrong_integers(values)
        model = values.get("model")
        if method == "draft_model" and (not isinstance(model, str) or not model):
            problems.append(f"speculative_config.model must be a model folder with method draft_model, got {model!r}")
        if method == "ngram" and model is not None:
            problems.append(f"speculative_config.model must be left out with method ngram, got {model!r}")
        if method == "draft_model":
            problems += [
                f"speculative_config.{name} must be left out with method draft_model, got {values[name]!r}"
                for name in ("prompt_lookup_min", "prompt_lookup_max")
                if name in values
            ]
        return problems


_FIELDS = tuple(field.name for field in fields(SpeculativeConfig))
_NAMES = ", ".join(_FIELDS)


def _wrong_integers(values: Mapping[str, Any]) -> list[str]:
    limits = {"num_speculative_tokens": MAX_SPECULATIVE_TOKENS}
    limits.update((name, _MAX_LOOKUP) for name in ("prompt_lookup_min", "prompt_lookup_max") if name in values)
    problems = [
        f"speculative_config.{name} must be an integer from 1 to {most}, got {values.get(name)!r}"
        for name, most in limits.items()
        if not _is_integer(values.get(name), most)
    ]
    least, most = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    if not problems and least is not None and most is not None and least > most:
        problems.append(f"speculative_config.prompt_lookup_min must be at most prompt_lookup_max, {most}, got {least}")
    return problems


def _is_integer(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
