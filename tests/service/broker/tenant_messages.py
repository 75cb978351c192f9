"""Messages of tenants in kombu's format, and helpers for the messages that a worker took."""

import json
from collections.abc import Iterable
from typing import Any

import redis

from headrace_broker.keys import queue_lists
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases

QUEUE = "headrace.m"
LISTS = queue_lists(QUEUE)


def envelope(name: str, tenant: Any = None, **headers: Any) -> str:
    """Return a message in kombu's format."""
    if tenant is not None:
        headers["tenant"] = tenant
    return json.dumps({"body": name, "headers": headers, "properties": {"delivery_tag": name}})


def push(client: "redis.Redis", tenant: Any, names: Iterable[str], *, step: int = 0) -> None:
    for name in names:
        client.lpush(LISTS[step], envelope(name, tenant))


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def take(leases: Leases, count: int = 1) -> list[LeasedMessage]:
    messages = leases.fetch(LISTS, count)
    for message in messages:
        leases.hold(message.lease_id, message)
    return messages


def name_of(message: LeasedMessage) -> str:
    return str(json.loads(message.body)["body"])


def names(messages: Iterable[LeasedMessage]) -> list[str]:
    return [name_of(message) for message in messages]


def tenant_of(message: LeasedMessage) -> str:
    return str(json.loads(message.body)["headers"].get("tenant", ""))
