"""Options of devices whose compiler must know every shape beforehand. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

STATIC_DEVICES = ("static-cpu",)
"""static-cpu: the static step on the CPU, uncompiled, to look for a fault without a device."""

_BUCKETS = ("prefill_buckets", "decode_buckets", "context_buckets")


@dataclass(slots=True, kw_only=True)
class StaticConfig:
    """What is compiled, one graph for each bucket of tokens or requests and each context bucket."""

    prefill_buckets: list[int] | None = None
    """Tokens of a prompt computed in one step; None takes 128, 512 and 2048 as far as a step and the model go."""
    decode_buckets: list[int] | None = None
    """Requests that get a token in one step; None takes the powers of 2 up to max_num_seqs."""
    context_buckets: list[int] | None = None
    """Tokens that attention reads; None takes 512, 2048, 8192 and max_model_len."""

    @classmethod
    def problems(cls, options: Any, device: object) -> Iterator[str]:
        """What is wrong with the fields of this class in `options`, given the device."""
        for name in (field.name for field in fields(cls)):
            value = getattr(options, name)
            if value is None:
                continue
            if device not in STATIC_DEVICES:
                yield f"{name} is set, but only the devices {', '.join(STATIC_DEVICES)} use it"
            elif name in _BUCKETS and not _are_buckets(value):
                yield f"{name} is {value!r}, must be a list of integers of at least 1 in rising order"


def _are_buckets(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(bucket, int) and bucket >= 1 for bucket in value)
        and value == sorted(set(value))
    )
