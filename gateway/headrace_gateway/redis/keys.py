"""Every Redis key of the gateway is declared here; those of the queue are in `headrace_broker.keys`.

`KEYS` is the table of them: docs/reference/redis-keys.md shows it, and Lua scripts take the names from it.
"""

from typing import Final

from headrace_broker.key_schema import KeySchema, Writer, span
from headrace_broker.keys import IDEMPOTENCY_SECONDS
from headrace_broker.scripts import LuaScript, load

CHARGED_SECONDS: Final = 90_000
"""Seconds after which no answer can be read: the longest life of a request plus an hour."""
BATCH_SECONDS: Final = 38 * 86_400
"""Seconds: the longest completion window plus a month."""

KEYS: Final = KeySchema()
_GATEWAY: Final[tuple[Writer, ...]] = ("gateway",)
_REQUEST: Final = "the request's `expires`, plus `HEADRACE_RESULT_TTL_SECONDS`, plus an hour"

REDIS_ID_KEY: Final = KEYS.fixed(
    "redis_id",
    "headrace:gw:redis-id",
    "string",
    _GATEWAY,
    "for ever",
    "A random id of this Redis, by which a gateway sees that it was replaced.",
)


@KEYS.built("zset", _GATEWAY, "while there is work")
def due_key(work: str) -> str:
    """Items of one kind of work that replicas share, by due time in milliseconds of Redis's clock."""
    return f"headrace:gw:work:{work}"


@KEYS.built("hash", _GATEWAY, "as the items")
def tokens_key(work: str) -> str:
    """By item: the token of its claim; the field '' has the last token."""
    return f"headrace:gw:work:{work}:token"


@KEYS.built("string", _GATEWAY, _REQUEST)
def envelope_key(answer_id: str) -> str:
    """The envelope, msgpack: owner and options of an answer, with which any replica can write it."""
    return f"headrace:gw:req:{answer_id}"


@KEYS.built("hash", _GATEWAY, f"{_REQUEST}; from its end on `--store-life`")
def response_key(response_id: str) -> str:
    """A stored response, both fields JSON: `input`, its input items, and `state`, how it ended."""
    return f"headrace:gw:response:{response_id}"


@KEYS.built("string", _GATEWAY, span(IDEMPOTENCY_SECONDS))
def deleted_key(response_id: str) -> str:
    """`1`: the response was deleted, so a repeat with its Idempotency-Key is refused."""
    return f"headrace:gw:deleted:{response_id}"


@KEYS.built("hash", _GATEWAY, "a minute after both buckets are full")
def rate_key(api_key: str) -> str:
    """`requests` and `tokens` of an API key: level of the token bucket, and Unix seconds at which it was written."""
    return f"headrace:gw:rate:{api_key}"


@KEYS.built("string", _GATEWAY, span(CHARGED_SECONDS))
def charged_key(answer_id: str) -> str:
    """Tokens charged so far for an answer."""
    return f"headrace:gw:charged:{answer_id}"


@KEYS.built("zset", _GATEWAY, "as the longest-lived item")
def stored_key(owner: str) -> str:
    """Large requests of a tenant or a key, by the Unix second at which the last of their data expires."""
    return f"headrace:gw:stored:{owner}"


@KEYS.built("hash", _GATEWAY, "as the longest-lived item")
def stored_bytes_key(owner: str) -> str:
    """By request: the bytes that it keeps in Redis; the field '' has their sum."""
    return f"headrace:gw:stored:{owner}:bytes"


@KEYS.built("hash", _GATEWAY, span(BATCH_SECONDS))
def batch_key(batch_id: str) -> str:
    """A batch: its record, its status, and how many bytes of its files are committed."""
    return f"headrace:gw:batch:{batch_id}"


@KEYS.built("zset", _GATEWAY, f"{span(BATCH_SECONDS)} after the newest")
def batches_key(owner: str) -> str:
    """The batches of one API key, by creation in milliseconds."""
    return f"headrace:gw:batches:{owner}"


@KEYS.built("string", _GATEWAY, "four days; an hour after it is done")
def delivery_key(endpoint: str, event_id: str) -> str:
    """The delivery of an event to an endpoint, msgpack: the event, failed attempts, and whether it is done."""
    return f"headrace:gw:webhook:delivery:{endpoint}:{event_id}"


@KEYS.built("zset", _GATEWAY, "the life of its newest event")
def undelivered_key(endpoint: str) -> str:
    """Undelivered events of an endpoint, by the time of their publication in milliseconds."""
    return f"headrace:gw:webhook:undelivered:{endpoint}"


def script(*names: str) -> LuaScript:
    """Return the script `lua/<name>.lua` of this folder; name preludes first. See `headrace_broker.scripts`."""
    return load("headrace_gateway.redis", KEYS, *names)
