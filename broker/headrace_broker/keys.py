"""Every Redis key of Headrace is built here, and nowhere else."""

from typing import Final
from urllib.parse import quote

QUEUE_PREFIX: Final = "headrace."
MODELS_KEY: Final = "headrace:models"
DEAD_LETTERS_KEY: Final = "headrace:dead"

# The worker's lease transport; one set of keys serves all queues of a Redis database.
LEASES_KEY: Final = "headrace:lease:leases"  # sorted set: lease id -> when it expires, by Redis's clock
# :held:<list>, :delayed:<list>  the same, of one list's messages: in a worker's hands, and before their time
LEASE_REQUESTS_KEY: Final = (
    f"{LEASES_KEY}:request"  # hash: request id -> lease id of the message that came first with it
)
LEASE_BODIES_KEY: Final = "headrace:lease:body"  # hash: lease id -> the message, byte for byte, sorted or leased
LEASE_RECORDS_KEY: Final = "headrace:lease:record"  # hash: lease id -> its place and charge, msgpack
LEASE_META_KEY: Final = "headrace:lease:meta"  # hash: lease id -> "<owner>|<list it came from>"
LEASE_DELIVERIES_KEY: Final = "headrace:lease:deliveries"  # hash: lease id -> how often it was handed out

_LEASE_HASHES: Final = (
    LEASE_REQUESTS_KEY,
    LEASE_BODIES_KEY,
    LEASE_RECORDS_KEY,
    LEASE_META_KEY,
    LEASE_DELIVERIES_KEY,
)

# Messages that wait, sorted by tenant; <level> is a list of a queue. The scripts build these names.
READY_PREFIX: Final = "headrace:ready:"
# ids:<level>             sorted set: lease id -> microseconds since when it ages there
# of:<level>\x06<tenant>  sorted set: lease id of one tenant -> microseconds that are its place
# tenants:<level>         sorted set: tenant that has messages there -> its service, tokens by weight
# waiting:<queue>         sorted set: tenant -> its messages at all levels
# delayed:<queue>         sorted set: tenant -> its messages whose time has not come
# bell:<queue>            list: one token as long as sorted messages wait
# What tenants have had, forgotten after a day without a message.
SHARE_PREFIX: Final = "headrace:share:"
# served:<level>  sorted set: tenant -> its service, waiting or not
# costs:<queue>   sorted set: tenant -> mean tokens of its requests
# clock, mean     hashes: level -> service at which the last message was taken; queue -> mean tokens of all requests

PRIORITY_STEPS: Final = (0, 3, 6, 9)  # 0 is served first; kombu keeps one list a step
PRIORITY_SEPARATOR: Final = "\x06\x16"  # kombu's, between the queue and its step

# A request's id comes behind these; stream_publish.lua puts it there itself.
STREAM_PREFIX: Final = "headrace:stream:"
ENDED_PREFIX: Final = "headrace:ended:"

PROBE_KEY: Final = "headrace:probe"  # written to see whether the server takes writes; it expires at once


def queue_name(model: str) -> str:
    """The Celery queue, and thereby the Redis list, of a served model."""
    return QUEUE_PREFIX + model


def queue_lists(queue: str) -> list[str]:
    """The Redis lists of a queue in the order in which they are served."""
    return [f"{queue}{PRIORITY_SEPARATOR}{step}" if step else queue for step in PRIORITY_STEPS]


def level_of(list_name: str) -> int:
    """The priority step of one of a queue's lists."""
    return int(list_name.partition(PRIORITY_SEPARATOR)[2] or 0)


def sorted_ids_key(list_name: str) -> str:
    """The lease ids of the messages that have been sorted out of this list, the longest there first."""
    return f"{READY_PREFIX}ids:{list_name}"


def tenant_ids_key(list_name: str, tenant: str) -> str:
    """Of these, the messages of one tenant."""
    return f"{READY_PREFIX}of:{list_name}\x06{tenant}"


def waiting_key(queue: str) -> str:
    """How many sorted messages of each tenant wait in this queue."""
    return f"{READY_PREFIX}waiting:{queue}"


def held_key(list_name: str) -> str:
    """The leases of the messages of this list that are in a worker's hands."""
    return f"{LEASES_KEY}:held:{list_name}"


def delayed_key(list_name: str) -> str:
    """The leases of the messages of this list whose time has not come."""
    return f"{LEASES_KEY}:delayed:{list_name}"


def delayed_tenants_key(queue: str) -> str:
    """How many messages each tenant has in this queue whose time has not come."""
    return f"{READY_PREFIX}delayed:{queue}"


def bell_key(queue: str) -> str:
    """The list that is not empty as long as sorted messages wait in this queue."""
    return f"{READY_PREFIX}bell:{queue}"


def queue_key_types(queue: str) -> dict[str, str]:
    """The keys that all messages of a queue need, and the type of each; those of single tenants are not among them."""
    of_all = {
        LEASES_KEY: "zset",
        DEAD_LETTERS_KEY: "list",
        f"{SHARE_PREFIX}clock": "hash",
        f"{SHARE_PREFIX}mean": "hash",
    }
    of_all |= dict.fromkeys(_LEASE_HASHES, "hash")
    of_queue = dict.fromkeys((waiting_key(queue), delayed_tenants_key(queue), f"{SHARE_PREFIX}costs:{queue}"), "zset")
    of_lists = {
        key: "zset"
        for name in queue_lists(queue)
        for key in (
            *(sorted_ids_key(name), held_key(name), delayed_key(name)),
            *(f"{READY_PREFIX}tenants:{name}", f"{SHARE_PREFIX}served:{name}"),
        )
    }
    return {**of_all, **of_queue, bell_key(queue): "list", **of_lists, **dict.fromkeys(queue_lists(queue), "list")}


def stream_key(request_id: str) -> str:
    """The stream that carries the tokens of a request."""
    return STREAM_PREFIX + request_id


def ended_key(request_id: str) -> str:
    """Exists for a while after the stream of an ended request has expired, for subscribers that come too late."""
    return ENDED_PREFIX + request_id


def tokenizer_calls_key(model: str) -> str:
    """The calls of a served model's tokenizer that no worker has taken; it expires with the last of them."""
    return f"headrace:tokenizer:calls:{model}"


def tokenizer_answer_key(call_id: str) -> str:
    """The list on which the answer to a call of a tokenizer is waited for."""
    return f"headrace:tokenizer:answer:{call_id}"


def hub_key(name: str) -> str:
    """A stream of one entry, by which the hub of this name is woken."""
    return f"headrace:hub:{name}"


def listener_key(request_id: str) -> str:
    """Whoever listens to the request keeps it alive; see `listeners.py`."""
    return f"headrace:listener:{request_id}"


def engine_losses_key(request_id: str) -> str:
    """How many engine processes died with the request in them; only where some did."""
    return f"headrace:losses:{request_id}"


def result_key(request_id: str) -> str:
    """Where Celery's Redis backend stores the result; the same name is its pub/sub channel."""
    return f"celery-task-meta-{request_id}"


def idempotency_key(tenant: str, digest: str) -> str:
    """The hash that says which request a client's idempotency key belongs to.

    The tenant's name is in it, so that a rule of Redis's ACL can keep a producer to the keys of its own tenant. It is
    quoted: no name is the beginning of another one, or a pattern.
    """
    return f"headrace:idempotency:{quote(tenant, safe='')}:{digest}"
