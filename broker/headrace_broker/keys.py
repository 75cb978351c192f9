"""Every Redis key of Headrace is built here, and nowhere else."""

from typing import Final

QUEUE_PREFIX: Final = "headrace."
MODELS_KEY: Final = "headrace:models"
DEAD_LETTERS_KEY: Final = "headrace:dead"

# The worker's lease transport; one set of keys serves all queues of a Redis database.
LEASES_KEY: Final = "headrace:lease:leases"  # sorted set: lease id -> when it expires, by Redis's clock
LEASE_BODIES_KEY: Final = "headrace:lease:body"  # hash: lease id -> the message, byte for byte
LEASE_META_KEY: Final = "headrace:lease:meta"  # hash: lease id -> "<owner>|<list it came from>"
LEASE_DELIVERIES_KEY: Final = "headrace:lease:deliveries"  # hash: lease id -> how often it was handed out

PRIORITY_STEPS: Final = (0, 3, 6, 9)  # 0 is served first; kombu keeps one list a step
PRIORITY_SEPARATOR: Final = "\x06\x16"  # kombu's, between the queue and its step

_STREAM_PREFIX: Final = "headrace:stream:"


def queue_name(model: str) -> str:
    """The Celery queue, and thereby the Redis list, of a served model."""
    return QUEUE_PREFIX + model


def queue_lists(queue: str) -> list[str]:
    """The Redis lists of a queue in the order in which they are served."""
    return [f"{queue}{PRIORITY_SEPARATOR}{step}" if step else queue for step in PRIORITY_STEPS]


def stream_key(request_id: str) -> str:
    """The stream that carries the tokens of a request."""
    return _STREAM_PREFIX + request_id


def engine_losses_key(request_id: str) -> str:
    """How many engine processes died with the request in them; only where some did."""
    return f"headrace:losses:{request_id}"


def result_key(request_id: str) -> str:
    """Where Celery's Redis backend stores the result; the same name is its pub/sub channel."""
    return f"celery-task-meta-{request_id}"


def idempotency_key(digest: str) -> str:
    """The hash that says which request a client's idempotency key belongs to."""
    return f"headrace:idempotency:{digest}"
