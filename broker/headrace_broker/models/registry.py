"""The models that were ever served. Workers register them when they start; clients check them before they submit.

An entry never expires. A model may have no worker for a while, and its queue grows meanwhile.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import redis

from headrace_broker.errors import MalformedEntryError
from headrace_broker.keys import MODELS_KEY
from headrace_broker.models.template_features import TemplateFeatures
from headrace_broker.packing import pack, unpack

REGISTER_SECONDS: Final = 60.0
"""How often a worker registers its model again."""


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A served name with the properties that the last worker to register it gave.

    Properties that a worker of an older release did not give have their defaults.
    """

    name: str
    max_model_len: int
    seen: float  # unix seconds
    worker: str
    created: float = 0.0
    """Time of the first registration, in unix seconds."""
    weights: str = ""
    """Fingerprint of the checkpoint."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer and the chat template."""
    loras: tuple[str, ...] = ()
    """Names of the adapters that its workers serve, as requests give them."""
    tool_parser: str | None = None
    """Name of the format in which the model writes tool calls, such as `hermes`."""
    reasoning_parser: str | None = None
    """Name of the format in which the model writes its reasoning, such as `think`."""
    template: TemplateFeatures = field(default_factory=TemplateFeatures)
    tokenizer_calls: bool = False
    """Its workers answer tokenizer calls; see `client/tokenizer_calls.py`."""
    tasks: tuple[str, ...] = ("generate",)
    """What its workers compute: `generate`, or pooling tasks."""
    dimensions: int | None = None
    """Length of an embedding; None for a model that does not embed."""
    matryoshka: bool = False
    """Whether a caller may ask for embeddings with fewer dimensions."""
    max_input_tokens: int | None = None
    """Tokens of one input of a pooling task; None for a model that generates."""
    prompts: tuple[str, ...] = ()
    """Names of the prompts that a caller may put before each text of an embedding."""
    batch_invariant: bool = False
    """Whether the row of an input has the same bytes whatever else a step computes."""
    tokens_per_second: float | None = None
    """Tokens that one full worker computes in a second, of prompts and outputs, as `Leases.cost` counts them. It is an
    average of the workers' speeds; None if no worker has measured one."""


def register_model(client: "redis.Redis", name: str, **properties: Any) -> None:
    """Register a served name for clients, with the other fields of its `RegisteredModel`.

    `seen` is the current time in unix seconds. The time of the first registration is kept. A worker's
    `tokens_per_second` counts as much as all earlier ones together; without one, the registered speed is kept.
    """
    before = read_models({name.encode(): packed} if (packed := client.hget(MODELS_KEY, name)) else {}).get(name)
    entry = asdict(RegisteredModel(name, **properties))
    del entry["name"]
    entry["created"] = before.created if before is not None and before.created else entry["seen"]
    if before is not None and before.tokens_per_second is not None:
        earlier, own = before.tokens_per_second, entry["tokens_per_second"]
        entry["tokens_per_second"] = earlier if own is None else (earlier + own) / 2
    client.hset(MODELS_KEY, name, pack(entry))


def known_models(client: "redis.Redis") -> dict[str, RegisteredModel]:
    """Return every model that was ever registered, by served name; none if the key holds another Redis type."""
    try:
        return read_models(client.hgetall(MODELS_KEY))
    except redis.ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        return {}


def read_models(raw: Mapping[Any, Any]) -> dict[str, RegisteredModel]:
    """Decode the registry's hash. Malformed entries are left out, so that they cannot stop a client."""
    models: dict[str, RegisteredModel] = {}
    for key, packed in raw.items():
        name = key.decode(errors="replace")
        try:
            models[name] = _read_model(name, unpack(packed))
        except (KeyError, TypeError, ValueError, OverflowError, MalformedEntryError):
            continue
    return models


def _read_model(name: str, data: Mapping[str, Any]) -> RegisteredModel:
    loras, tasks, prompts = (data.get(name) for name in ("loras", "tasks", "prompts"))
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
        template=TemplateFeatures.from_wire(data.get("template")),
        tokenizer_calls=data.get("tokenizer_calls") is True,
        tasks=tuple(map(str, tasks)) if isinstance(tasks, list) and tasks else ("generate",),
        dimensions=_integer(data.get("dimensions")),
        matryoshka=data.get("matryoshka") is True,
        max_input_tokens=_integer(data.get("max_input_tokens")),
        prompts=tuple(map(str, prompts)) if isinstance(prompts, list) else (),
        batch_invariant=data.get("batch_invariant") is True,
        tokens_per_second=_speed(data.get("tokens_per_second")),
    )


def _unix_seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError("not a time")
    return seconds


def _speed(value: object) -> float | None:
    return value if isinstance(value, float) and 0 < value < math.inf else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
