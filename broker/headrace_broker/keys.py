"""Declares every Redis key of the queue.

`KEYS` is their table: docs/reference/redis-keys.md shows it, and Lua scripts take the names from it (`scripts.py`).
The gateway's own keys are in `headrace_gateway.redis.keys`.
"""

from typing import Final
from urllib.parse import quote

from headrace_broker.key_schema import KeySchema, RedisType, Writer, span
from headrace_wire.codes import PRIORITY_STEPS, DeadLetterReason

QUEUE_PREFIX: Final = "headrace."
ALL_STEPS: Final = 10
"""A number above every priority step, so that `step < ALL_STEPS` is always true."""
PRIORITY_SEPARATOR: Final = "\x06\x16"  # kombu's separator between the name of a queue and a step

ENDED_SECONDS: Final = 3600
"""How long the key `headrace:ended:<request id>` outlives the stream."""
REQUEUED_SECONDS: Final = 86_400
"""Lifetime of a stream whose request was returned to the queue, where it may wait for long."""
LISTENER_SECONDS: Final = 86_400
ENGINE_LOSSES_SECONDS: Final = 86_400
"""Long, as the message may wait for hours before the next worker takes it."""
IDEMPOTENCY_SECONDS: Final = 86_400
HUB_SECONDS: Final = 3600
TOKENIZER_SECONDS: Final = 10
REAPER_SECONDS: Final = 0.4
"""How often the reaper of a queue and its deputy renew their rights."""
REAPER_MILLISECONDS: Final = 600
"""How long a worker that has died stays the reaper of its queues. With `REAPER_SECONDS` it is a second at most."""
ELECTION_SECONDS: Final = 2.0
"""How often the other workers try to become the reaper or the deputy of a queue."""
HOLDERS_SECONDS: Final = 3600
HOLDERS_KEPT: Final = 10_000
"""The most conversations of a queue whose holders are known: those that were taken last."""
CREDIT_MILLISECONDS: Final = 5000
"""How long a worker's free slots are believed. Workers with free slots renew them after 2 to 3 s."""
SHARE_SECONDS: Final = 86_400
"""Lifetime of a tenant's service after its last message. Service is the tokens received, divided by the weight."""

KEYS: Final = KeySchema(
    {
        "PRIORITY_SEPARATOR": PRIORITY_SEPARATOR,
        "ENDED_SECONDS": str(ENDED_SECONDS),
        "SHARE_SECONDS": str(SHARE_SECONDS),
        "REAPER_MILLISECONDS": str(REAPER_MILLISECONDS),
        "HOLDERS_SECONDS": str(HOLDERS_SECONDS),
        "HOLDERS_KEPT": str(HOLDERS_KEPT),
        "CREDIT_MILLISECONDS": str(CREDIT_MILLISECONDS),
        **{f"DEAD_{reason.name}": reason.value for reason in DeadLetterReason},
    }
)
_WORKER: Final[tuple[Writer, ...]] = ("worker", "operator")
_GATEWAY: Final[tuple[Writer, ...]] = ("gateway", *_WORKER)
_PRODUCER: Final[tuple[Writer, ...]] = ("producer", *_GATEWAY)
_FOR_EVER: Final = "for ever"
_KNOWN: Final = "while a message waits or is leased"
_WAITING: Final = "while messages wait"
_LEASED: Final = "while a message is leased or delayed"
_SHARE: Final = f"{span(SHARE_SECONDS)} after the last message"
_RESULT: Final = "`HEADRACE_RESULT_TTL_SECONDS`"

MODELS_KEY: Final = KEYS.fixed(
    "models", "headrace:models", "hash", _WORKER, _FOR_EVER, "By served name: what its workers registered."
)
DEAD_LETTERS_KEY: Final = KEYS.fixed(
    "dead_letters", "headrace:dead", "list", _GATEWAY, _FOR_EVER, "The newest thousand dead letters, the newest first."
)
PROBE_KEY: Final = KEYS.fixed(
    "probe", "headrace:probe", "string", _WORKER, "1 ms", "Nothing: a write tests whether the server accepts writes."
)

# -- leases: one set of keys serves all queues of a Redis database

LEASES_KEY: Final = KEYS.fixed(
    "leases", "headrace:lease:leases", "zset", _WORKER, _LEASED, "Lease ids by expiry, unix seconds of Redis's clock."
)
LEASE_REQUESTS_KEY: Final = KEYS.fixed(
    "lease_requests", f"{LEASES_KEY}:request", "hash", _WORKER, _KNOWN, "By request id: lease id of its first message."
)
LEASE_BODIES_KEY: Final = KEYS.fixed(
    "lease_bodies", "headrace:lease:body", "hash", _WORKER, _KNOWN, "By lease id: a sorted message, byte for byte."
)
LEASE_RECORDS_KEY: Final = KEYS.fixed(
    "lease_records", "headrace:lease:record", "hash", _WORKER, _KNOWN, "By lease id: queue place and charge, msgpack."
)
LEASE_META_KEY: Final = KEYS.fixed(
    "lease_meta", "headrace:lease:meta", "hash", _WORKER, _LEASED, "By lease id: `<owner>|<list where it arrived>`."
)
LEASE_DELIVERIES_KEY: Final = KEYS.fixed(
    "lease_deliveries", "headrace:lease:deliveries", "hash", _WORKER, _KNOWN, "By lease id: how often it was delivered."
)


@KEYS.built("zset", _WORKER, _LEASED)
def held_key(list_name: str) -> str:
    """The leases of the messages of this list that a worker holds."""
    return f"{LEASES_KEY}:held:{list_name}"


@KEYS.built("zset", _WORKER, "until they are due")
def delayed_key(list_name: str) -> str:
    """The leases of the delayed messages of this list."""
    return f"{LEASES_KEY}:delayed:{list_name}"


@KEYS.built("string", _WORKER, f"{REAPER_MILLISECONDS} ms")
def reaper_key(queue: str) -> str:
    """The owner of leases that returns expired leases of this queue. Each of its renewals sets the lifetime again."""
    return f"headrace:lease:reaper:{queue}"


@KEYS.built("string", _WORKER, f"{REAPER_MILLISECONDS} ms")
def deputy_key(queue: str) -> str:
    """The owner of leases that becomes the reaper of this queue if the reaper dies. It renews this key as often."""
    return f"headrace:lease:deputy:{queue}"


# -- messages that wait: a queue has four lists, one per priority step. A worker sorts a message: it moves it from its
# list to sorted sets. A message that wakes an idle worker is moved to an `arrived` list first.


@KEYS.built("list", _PRODUCER, "until a worker sorts the messages", name="list")
def queue_name(model: str) -> str:
    """The unsorted messages of a model: no worker has moved them to the sorted sets `headrace:ready:*` yet.
    For steps 3, 6 and 9, `\\x06\\x16` and the step follow the name.
    """
    return QUEUE_PREFIX + model


@KEYS.built("list", _WORKER, "until a worker sorts the messages")
def arrived_key(list_name: str) -> str:
    """The unsorted messages of this list that woke a worker. They are older than those in the list."""
    return f"headrace:ready:arrived:{list_name}"


@KEYS.built("zset", _WORKER, _WAITING)
def sorted_ids_key(list_name: str) -> str:
    """The lease ids of the sorted messages of this list, by the unix microseconds at which their age is 0."""
    return f"headrace:ready:ids:{list_name}"


@KEYS.built("zset", _WORKER, _WAITING)
def tenant_ids_key(list_name: str, tenant: str) -> str:
    """The lease ids of one tenant's sorted messages of this list, by the unix microseconds that order them."""
    return f"headrace:ready:of:{list_name}\x06{tenant}"


@KEYS.built("zset", _WORKER, _WAITING)
def tenant_deadlines_key(list_name: str, tenant: str) -> str:
    """The lease ids of one tenant's sorted messages of this list that have `expires`, by that time in microseconds."""
    return f"headrace:ready:deadlines-of:{list_name}\x06{tenant}"


@KEYS.built("zset", _WORKER, _WAITING)
def tenants_key(list_name: str) -> str:
    """The tenants with sorted messages of this list, by service: tokens divided by weight."""
    return f"headrace:ready:tenants:{list_name}"


@KEYS.built("zset", _WORKER, _WAITING)
def deadlines_key(queue: str) -> str:
    """The lease ids of the sorted messages of this queue that have `expires`, by that time in unix microseconds."""
    return f"headrace:ready:deadlines:{queue}"


@KEYS.built("zset", _WORKER, _WAITING)
def waiting_key(queue: str) -> str:
    """How many sorted messages of each tenant wait in this queue."""
    return f"headrace:ready:waiting:{queue}"


@KEYS.built("zset", _WORKER, "until they are due")
def delayed_tenants_key(queue: str) -> str:
    """How many delayed messages each tenant has in this queue."""
    return f"headrace:ready:delayed:{queue}"


@KEYS.built("list", _WORKER, _WAITING)
def wake_up_key(queue: str) -> str:
    """One wake-up token if sorted messages wait in this queue. The worker that it wakes takes it."""
    return f"headrace:ready:bell:{queue}"


# -- prefix affinity: only workers with `--prefix-affinity` and a `--prefix-grace` use these keys


@KEYS.built("hash", _WORKER, f"{span(HOLDERS_SECONDS)} after the last message of a conversation")
def holders_key(queue: str) -> str:
    """By conversation: its holder, the owner of leases that took its latest request, and the unix microseconds of it.

    Beyond `HOLDERS_KEPT` the oldest of a few random conversations is forgotten for each new one.
    """
    return f"headrace:ready:holders:{queue}"


@KEYS.built("string", _WORKER, f"{CREDIT_MILLISECONDS} ms")
def credit_key(queue: str, worker: str) -> str:
    """How many choices this worker, an owner of leases, can take from this queue; absent if it has no free slot."""
    return f"headrace:ready:credit:{queue}:{worker}"


@KEYS.built("list", _WORKER, f"{CREDIT_MILLISECONDS} ms, or until the worker takes it")
def holder_wake_up_key(queue: str, worker: str) -> str:
    """One wake-up token for this worker if a message of a conversation that it holds waits in this queue."""
    return f"headrace:ready:bell:{queue}:{worker}"


# -- fair share: the service that tenants have received

VIRTUAL_TIME_KEY: Final = KEYS.fixed(
    "virtual_time", "headrace:share:clock", "hash", _WORKER, _SHARE, "By list: highest service of any served tenant."
)
MEAN_COST_KEY: Final = KEYS.fixed(
    "mean_cost", "headrace:share:mean", "hash", _WORKER, _SHARE, "By queue: moving average of requests' tokens."
)


@KEYS.built("zset", _WORKER, _SHARE)
def served_key(list_name: str) -> str:
    """The service of each tenant, whether it has waiting messages or not."""
    return f"headrace:share:served:{list_name}"


@KEYS.built("zset", _WORKER, _SHARE)
def costs_key(queue: str) -> str:
    """Moving average of the tokens of each tenant's requests."""
    return f"headrace:share:costs:{queue}"


# -- one request


@KEYS.built("stream", _PRODUCER, f"{_RESULT} after its last entry; {span(REQUEUED_SECONDS)} while its request waits")
def stream_key(request_id: str) -> str:
    """The stream that carries the tokens of a request."""
    return f"headrace:stream:{request_id}"


@KEYS.built("string", _PRODUCER, f"{span(ENDED_SECONDS)} longer than the stream")
def ended_key(request_id: str) -> str:
    """Tells late subscribers that the request has ended."""
    return f"headrace:ended:{request_id}"


@KEYS.built("string", ("subscriber", *_PRODUCER), f"{span(LISTENER_SECONDS)} after each heartbeat")
def listener_key(request_id: str) -> str:
    """The `abandon_after` of a request; a subscriber keeps it alive (`streams/listeners.py`)."""
    return f"headrace:listener:{request_id}"


@KEYS.built("string", _GATEWAY, span(ENGINE_LOSSES_SECONDS))
def engine_losses_key(request_id: str) -> str:
    """How many engine processes died while they ran the request; absent if none did."""
    return f"headrace:losses:{request_id}"


@KEYS.built("string", _GATEWAY, _RESULT)
def result_key(request_id: str) -> str:
    """The result, stored by Celery's Redis backend; the same name is its pub/sub channel."""
    return f"celery-task-meta-{request_id}"


@KEYS.built("hash", _PRODUCER, span(IDEMPOTENCY_SECONDS))
def idempotency_key(tenant: str, digest: str) -> str:
    """Which request a client's idempotency key belongs to; the tenant is percent-encoded.

    The key contains the tenant, so that a rule of Redis's ACL can limit a producer to the keys of its own tenant. As
    the tenant is encoded, such a rule matches no other tenant's keys.
    """
    return f"headrace:idempotency:{quote(tenant, safe='')}:{digest}"


# -- calls that bypass the queue


@KEYS.built("list", _GATEWAY, f"{span(TOKENIZER_SECONDS)} after the last call")
def tokenizer_calls_key(model: str) -> str:
    """The calls to a served model's tokenizer that no worker has taken yet."""
    return f"headrace:tokenizer:calls:{model}"


@KEYS.built("list", _GATEWAY, span(TOKENIZER_SECONDS))
def tokenizer_answer_key(call_id: str) -> str:
    """The answer to one tokenizer call."""
    return f"headrace:tokenizer:answer:{call_id}"


@KEYS.built("stream", _GATEWAY, f"{span(HUB_SECONDS)} after its last entry")
def hub_key(name: str) -> str:
    """One entry, which wakes the hub of this name."""
    return f"headrace:hub:{name}"


# -- the keys of a queue


def queue_lists(queue: str) -> list[str]:
    """Return the Redis lists of a queue in the order in which they are served."""
    return [f"{queue}{PRIORITY_SEPARATOR}{step}" if step else queue for step in PRIORITY_STEPS]


def step_of(list_name: str) -> int:
    """Return the priority step of one of a queue's lists."""
    return int(list_name.partition(PRIORITY_SEPARATOR)[2] or 0)


def queue_key_types(queue: str) -> dict[str, RedisType]:
    """Return the type of each key that all messages of a queue need. Keys of single tenants are not included."""
    lists = queue_lists(queue)
    of_queue = (
        *(reaper_key, deputy_key, waiting_key, deadlines_key, delayed_tenants_key, costs_key, wake_up_key),
        holders_key,
    )
    of_lists = (arrived_key, sorted_ids_key, held_key, delayed_key, tenants_key, served_key)
    fixed = [key for key in KEYS if not key.parts and key.name not in ("models", "probe")]
    return (
        {key.pattern: key.type for key in fixed}
        | {build(queue): KEYS.of(build).type for build in of_queue}
        | {build(name): KEYS.of(build).type for build in of_lists for name in lists}
        | dict.fromkeys(lists, KEYS["list"].type)
    )
