"""Which models were ever served: written by workers when they start, read by clients before they submit.

An entry never expires: that no worker serves the model right now is normal, its queue just grows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from headrace_broker.errors import MalformedEntryError
from headrace_broker.events import pack, unpack
from headrace_broker.keys import MODELS_KEY
from headrace_broker.model_traits import TemplateTraits


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A served name, and what the last worker that registered it said about it.

    What a worker of an older release did not say has its default.
    """

    name: str
    max_model_len: int
    seen: float  # unix seconds
    worker: str
    created: float = 0.0
    """When it was registered first, unix seconds."""
    weights: str = ""
    """Fingerprint of the checkpoint."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer and the chat template."""
    loras: tuple[str, ...] = ()
    """Adapters that its workers serve, by the names under which requests ask for them."""
    tool_parser: str | None = None
    """Name of the format in which the model writes tool calls, such as `hermes`."""
    reasoning_parser: str | None = None
    """Name of the format in which the model writes its reasoning, such as `think`."""
    template: TemplateTraits = field(default_factory=TemplateTraits)
    tokenizer_calls: bool = False
    """Its workers answer calls of its tokenizer, see `tokenizer_calls.py`."""


def register_model(
    client: "redis.Redis",
    name: str,
    *,
    max_model_len: int,
    worker: str,
    seen: float,
    weights: str = "",
    tokenizer: str = "",
    loras: Sequence[str] = (),
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    template: TemplateTraits | None = None,
    tokenizer_calls: bool = False,
) -> None:
    """Tell clients that this name is served; `seen` is the time now, in unix seconds."""
    before = read_models({name.encode(): packed} if (packed := client.hget(MODELS_KEY, name)) else {}).get(name)
    entry: dict[str, Any] = {
        "max_model_len": max_model_len,
        "seen": seen,
        "worker": worker,
        "created": before.created if before is not None and before.created else seen,
        "weights": weights,
        "tokenizer": tokenizer,
        "loras": list(loras),
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser,
        "tokenizer_calls": tokenizer_calls,
    }
    if template is not None:
        entry["template"] = template.to_wire()
    client.hset(MODELS_KEY, name, pack(entry))


def known_models(client: "redis.Redis") -> dict[str, RegisteredModel]:
    """Every model that was ever registered, by served name; none where somebody has put something else there."""
    try:
        return read_models(client.hgetall(MODELS_KEY))
    except redis.ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        return {}


def read_models(raw: Mapping[Any, Any]) -> dict[str, RegisteredModel]:
    """Decodes the registry's hash; an entry that is not ours is left out, as it must not stop a client."""
    models: dict[str, RegisteredModel] = {}
    for key, packed in raw.items():
        name = key.decode(errors="replace")
        try:
            models[name] = _read_model(name, unpack(packed))
        except (KeyError, TypeError, ValueError, OverflowError, MalformedEntryError):
            continue
    return models


def _read_model(name: str, data: Mapping[str, Any]) -> RegisteredModel:
    loras = data.get("loras")
    return RegisteredModel(
        name,
        int(data["max_model_len"]),
        _unix_seconds(data["seen"]),
        str(data["worker"]),
        created=_unix_seconds(data.get("created") or data["seen"]),
        weights=_text(data.get("weights")) or "",
        tokenizer=_text(data.get("tokenizer")) or "",
        loras=tuple(map(str, loras)) if isinstance(loras, list) else (),
        tool_parser=_text(data.get("tool_parser")),
        reasoning_parser=_text(data.get("reasoning_parser")),
        template=TemplateTraits.from_wire(data.get("template")),
        tokenizer_calls=data.get("tokenizer_calls") is True,
    )


def _unix_seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError("not a time")
    return seconds


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
