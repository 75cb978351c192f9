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
SENT_SECONDS: Final = 86_400
HUB_SECONDS: Final = 3600
CONTENT_DIGITS: Final = 32
"""The first digits of a `message_envelope.content_digest`; the others are those of the queue."""
TOKENIZER_SECONDS: Final = 10
REAPER_SECONDS: Final = 0.4
"""How often the reaper of a queue and its deputy renew their rights."""
REAPER_MILLISECONDS: Final = 600
"""How long a worker that has died stays the reaper of its queues. With `REAPER_SECONDS` it is a second at most."""
RESTING_REAPER_SECONDS: Final = 0.8
"""The same as `REAPER_SECONDS` while the queue has no message, so that no lease can expire soon."""
RESTING_REAPER_MILLISECONDS: Final = 1200
"""The same as `REAPER_MILLISECONDS` while the queue has no message."""
ELECTION_SECONDS: Final = 4.0
"""How often the other workers try to become the reaper or the deputy of a queue."""
HOLDERS_SECONDS: Final = 3600
HOLDERS_KEPT: Final = 10_000
"""The most conversations of a queue whose holders are known: those that were taken last."""
CREDIT_MILLISECONDS: Final = 5000
"""How long a worker's free slots are believed. Workers with free slots renew them after 2 to 3 s."""
LOADING_SECONDS: Final = 15
"""How long a worker's report that it is loading a model is believed. Workers renew it every 2 s."""
SHARE_SECONDS: Final = 86_400
"""Lifetime of a tenant's service after its last message. Service is the tokens received, divided by the weight."""

LEASE_KEYS: Final = "headrace:lease:*"
"""The pattern of all keys of leases."""
GATEWAY_KEYS: Final = "headrace:gw:*"
"""The pattern of the gateway's own keys."""

KEYS: Final = KeySchema(
    {
        "PRIORITY_SEPARATOR": PRIORITY_SEPARATOR,
        "ENDED_SECONDS": str(ENDED_SECONDS),
        "SHARE_SECONDS": str(SHARE_SECONDS),
        "SENT_SECONDS": str(SENT_SECONDS),
        "CONTENT_DIGITS": str(CONTENT_DIGITS),
        "REAPER_MILLISECONDS": str(REAPER_MILLISECONDS),
        "RESTING_REAPER_MILLISECONDS": str(RESTING_REAPER_MILLISECONDS),
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
LOADING_KEY: Final = KEYS.fixed(
    "loading",
    "headrace:loading",
    "hash",
    _WORKER,
    f"{span(LOADING_SECONDS)} after the last report",
    "By worker: the served names of the model that it is loading, and its progress (msgpack).",
)
PROBE_KEY: Final = KEYS.fixed(
    "probe", "headrace:probe", "string", _WORKER, "1 ms", "Nothing: a write tests whether the server accepts writes."
)


@KEYS.built("string", _WORKER, "1 ms")
def shard_probe_key(shard: str) -> str:
    """Nothing: the same test of one shard of a Redis Cluster."""
    return f"headrace:probe:{shard}"


STREAM_SERVERS_KEY: Final = KEYS.fixed(
    "stream_servers",
    "headrace:stream-servers",
    "hash",
    ("operator",),
    _FOR_EVER,
    "By name of a stream server: since when and until when new streams are placed there, and its id (msgpack).",
)
STREAM_SERVER_ID_KEY: Final = KEYS.fixed(
    "stream_server_id",
    "headrace:stream-server-id",
    "string",
    ("operator",),
    _FOR_EVER,
    "The random id of this stream server, which is also in its row of `headrace:stream-servers`.",
)

# -- leases: each queue has its own set of keys


@KEYS.built("zset", _WORKER, _LEASED)
def leases_key(queue: str) -> str:
    """Lease ids by expiry, unix seconds of Redis's clock."""
    return f"headrace:lease:leases:{queue}"


@KEYS.built("hash", _WORKER, _KNOWN)
def lease_requests_key(queue: str) -> str:
    """By request id: lease id of its first message."""
    return f"headrace:lease:request:{queue}"


@KEYS.built("hash", _WORKER, _KNOWN)
def lease_bodies_key(queue: str) -> str:
    """By lease id: a sorted message, byte for byte."""
    return f"headrace:lease:body:{queue}"


@KEYS.built("hash", _WORKER, _KNOWN)
def lease_records_key(queue: str) -> str:
    """By lease id: queue place and charge, msgpack."""
    return f"headrace:lease:record:{queue}"


@KEYS.built("hash", _WORKER, _LEASED)
def lease_meta_key(queue: str) -> str:
    """By lease id: `<owner>|<list where it arrived>`."""
    return f"headrace:lease:meta:{queue}"


@KEYS.built("hash", _WORKER, _KNOWN)
def lease_deliveries_key(queue: str) -> str:
    """By lease id: how often it was delivered."""
    return f"headrace:lease:deliveries:{queue}"


@KEYS.built("zset", _WORKER, _LEASED)
def held_key(list_name: str) -> str:
    """The leases of the messages of this list that a worker holds."""
    return f"headrace:lease:held:{list_name}"


@KEYS.built("zset", _WORKER, "until they are due")
def delayed_key(list_name: str) -> str:
    """The leases of the delayed messages of this list."""
    return f"headrace:lease:delayed:{list_name}"


@KEYS.built("list", _GATEWAY, _FOR_EVER)
def dead_letters_key(queue: str) -> str:
    """The newest thousand dead letters of this queue, the newest first."""
    return f"headrace:dead:{queue}"


@KEYS.built("string", _WORKER, f"at most {RESTING_REAPER_MILLISECONDS} ms")
def reaper_key(queue: str) -> str:
    """The owner of leases that returns expired leases of this queue. Each of its renewals sets the lifetime again."""
    return f"headrace:queue:reaper:{queue}"


@KEYS.built("string", _WORKER, f"at most {RESTING_REAPER_MILLISECONDS} ms")
def deputy_key(queue: str) -> str:
    """The owner of leases that becomes the reaper of this queue if the reaper dies. It renews this key as often."""
    return f"headrace:queue:deputy:{queue}"


# -- messages that wait: a queue has four lists, one per priority step. A worker sorts a message: it moves it from its
# list to sorted sets. A message that wakes an idle worker is moved to an `arrived` list first.


@KEYS.built("list", _PRODUCER, "until a worker sorts the messages", name="list")
def queue_name(model: str) -> str:
    """The unsorted messages of a model: no worker has moved them to the sorted sets `headrace:queue:*` yet.
    For steps 3, 6 and 9, `\\x06\\x16` and the step follow the name.
    """
    return QUEUE_PREFIX + model


@KEYS.built("list", _WORKER, "until a worker sorts the messages")
def arrived_key(list_name: str) -> str:
    """The unsorted messages of this list that woke a worker. They are older than those in the list."""
    return f"headrace:queue:arrived:{list_name}"


@KEYS.built("zset", _WORKER, _WAITING)
def sorted_ids_key(list_name: str) -> str:
    """The lease ids of the sorted messages of this list, by the unix microseconds at which their age is 0."""
    return f"headrace:queue:ids:{list_name}"


@KEYS.built("zset", _WORKER, _WAITING)
def tenant_ids_key(list_name: str, tenant: str) -> str:
    """The lease ids of one tenant's sorted messages of this list, by the unix microseconds that order them.

    That is when a message began to wait. For an urgent message with `due` it is its latest start less 1.8 * 10^16, and
    for a late one its latest start less 9 * 10^15.
    """
    return f"headrace:queue:of:{list_name}\x06{tenant}"


@KEYS.built("zset", _WORKER, _WAITING)
def tenant_deadlines_key(list_name: str, tenant: str) -> str:
    """The lease ids of one tenant's sorted messages of this list that have `expires`, by that time in microseconds."""
    return f"headrace:queue:deadlines-of:{list_name}\x06{tenant}"


@KEYS.built("zset", _WORKER, _WAITING)
def tenant_starts_key(list_name: str, tenant: str) -> str:
    """The lease ids of one tenant's sorted messages of this list that have `due`, by the unix microseconds of their
    latest start; not those that are urgent or late.
    """
    return f"headrace:queue:latest-starts-of:{list_name}\x06{tenant}"


@KEYS.built("zset", _WORKER, _WAITING)
def tenants_key(list_name: str) -> str:
    """The tenants with sorted messages of this list, by service: tokens divided by weight."""
    return f"headrace:queue:tenants:{list_name}"


@KEYS.built("zset", _WORKER, _WAITING)
def deadlines_key(queue: str) -> str:
    """The lease ids of the sorted messages of this queue that have `expires`, by that time in unix microseconds."""
    return f"headrace:queue:deadlines:{queue}"


@KEYS.built("zset", _WORKER, _WAITING)
def latest_starts_key(queue: str) -> str:
    """The lease ids of the sorted messages of this queue that have `due`, by the unix microseconds of their latest
    start; not those that can no longer end in time.
    """
    return f"headrace:queue:latest-starts:{queue}"


@KEYS.built("zset", _WORKER, _WAITING)
def waiting_key(queue: str) -> str:
    """How many sorted messages of each tenant wait in this queue."""
    return f"headrace:queue:waiting:{queue}"


@KEYS.built("zset", _WORKER, "until they are due")
def delayed_tenants_key(queue: str) -> str:
    """How many delayed messages each tenant has in this queue."""
    return f"headrace:queue:delayed:{queue}"


@KEYS.built("list", _WORKER, _WAITING)
def wake_up_key(queue: str) -> str:
    """One wake-up token if sorted messages wait in this queue. The worker that it wakes takes it."""
    return f"headrace:queue:wake-up:{queue}"


# -- prefix affinity: only workers with `--prefix-affinity` and a `--prefix-grace` use these keys


@KEYS.built("hash", _WORKER, f"{span(HOLDERS_SECONDS)} after the last message of a conversation")
def holders_key(queue: str) -> str:
    """By conversation and tenant: its holder, the owner of leases that took its latest request, and the unix
    microseconds of it.

    Beyond `HOLDERS_KEPT` the oldest of a few random conversations is forgotten for each new one.
    """
    return f"headrace:queue:holders:{queue}"


@KEYS.built("string", _WORKER, f"{CREDIT_MILLISECONDS} ms")
def credit_key(queue: str, worker: str) -> str:
    """How many choices this worker, an owner of leases, can take from this queue; absent if it has no free slot."""
    return f"headrace:queue:credit:{queue}:{worker}"


@KEYS.built("list", _WORKER, f"{CREDIT_MILLISECONDS} ms, or until the worker takes it")
def holder_wake_up_key(queue: str, worker: str) -> str:
    """One wake-up token for this worker if a message of a conversation that it holds waits in this queue."""
    return f"headrace:queue:wake-up:{queue}:{worker}"


# -- fair share: the service that tenants have received


@KEYS.built("hash", _WORKER, _SHARE)
def virtual_time_key(queue: str) -> str:
    """By list of this queue: highest service of any served tenant."""
    return f"headrace:share:clock:{queue}"


@KEYS.built("string", _WORKER, _SHARE)
def mean_cost_key(queue: str) -> str:
    """Moving average of the tokens of this queue's requests."""
    return f"headrace:share:mean:{queue}"


@KEYS.built("zset", _WORKER, _SHARE)
def served_key(list_name: str) -> str:
    """The service of each tenant, whether it has waiting messages or not."""
    return f"headrace:share:served:{list_name}"


@KEYS.built("zset", _WORKER, _SHARE)
def costs_key(queue: str) -> str:
    """Moving average of the tokens of each tenant's requests."""
    return f"headrace:share:costs:{queue}"


# -- usage


@KEYS.built("hash", _WORKER, "`HEADRACE_USAGE_DAYS` after the hour")
def usage_key(start: int) -> str:
    """Sums of the requests that ended in the hour that begins then, in unix seconds, by tenant, API key's name, queue,
    kind and priority step; both msgpack.
    """
    return f"headrace:usage:{start}"


@KEYS.built("zset", _WORKER, f"{_RESULT} plus {span(ENDED_SECONDS)} and an hour after the last request")
def tenant_requests_key(tenant: str) -> str:
    """The requests of a tenant that ended, by the unix seconds at which their streams and results have expired.

    `headrace erase` finds them by it.
    """
    return f"headrace:tenant-requests:{tenant}"


@KEYS.built("hash", _GATEWAY, "2 days")
def spent_key(day: int) -> str:
    """By name of an API key: the tokens of its requests that ended on the day that begins then, in unix seconds."""
    return f"headrace:budget:spent:{day}"


@KEYS.built("zset", _GATEWAY, "until the last request has expired")
def reserved_key(key_name: str) -> str:
    """The open requests of an API key with a budget, by the unix seconds at which their reservations expire."""
    return f"headrace:budget:reserved:{key_name}"


@KEYS.built("hash", _GATEWAY, "until the last request has expired")
def reserved_tokens_key(key_name: str) -> str:
    """By open request of an API key with a budget: the tokens that it may use; the field '' has their sum."""
    return f"headrace:budget:tokens:{key_name}"


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


@KEYS.built("string", _WORKER, span(SENT_SECONDS))
def sent_key(request_id: str) -> str:
    """The digest of a request whose callbacks were sent, so that a copy of its message sends them no more."""
    return f"headrace:sent:{request_id}"


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


@KEYS.built("stream", ("subscriber", *_GATEWAY), f"{span(HUB_SECONDS)} after its last entry")
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


def queue_of(list_name: str) -> str:
    """Return the queue of one of its lists."""
    return list_name.partition(PRIORITY_SEPARATOR)[0]


def queue_key_types(queue: str) -> dict[str, RedisType]:
    """Return the type of each key that all messages of a queue need. Keys of single tenants are not included."""
    of_queue = [key for key in KEYS if key.parts == ("queue",)]
    of_lists = [key for key in KEYS if key.parts == ("list_name",)]
    lists = queue_lists(queue)
    return (
        {key.pattern.replace("<queue>", queue): key.type for key in of_queue}
        | {key.pattern.replace("<list_name>", name): key.type for key in of_lists for name in lists}
        | dict.fromkeys(lists, KEYS["list"].type)
    )
