"""Which models were ever served: written by workers when they start, read by clients before they submit.

An entry never expires: that no worker serves the model right now is normal, its queue just grows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from headrace_broker.errors import MalformedEntryError
from headrace_broker.events import pack, unpack
from headrace_broker.keys import MODELS_KEY


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A served name, and what the last worker that registered it said about it."""

    name: str
    max_model_len: int
    seen: float  # unix seconds
    worker: str


def register_model(client: "redis.Redis", name: str, *, max_model_len: int, worker: str, seen: float) -> None:
    """Tells clients that this name is served; `seen` is the time now, in unix seconds."""
    client.hset(MODELS_KEY, name, pack({"max_model_len": max_model_len, "seen": seen, "worker": worker}))


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
    for field, packed in raw.items():
        name = field.decode(errors="replace")
        try:
            models[name] = _read_model(name, unpack(packed))
        except (KeyError, TypeError, ValueError, MalformedEntryError):
            continue
    return models


def _read_model(name: str, data: Mapping[str, Any]) -> RegisteredModel:
    return RegisteredModel(name, int(data["max_model_len"]), float(data["seen"]), str(data["worker"]))
