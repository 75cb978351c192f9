"""Celery messages as Redis stores them, for tests that write them directly."""

import base64
from typing import Any

import msgpack

from service.workers.service import QUEUE

GOOD_PARAMS = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
GOOD_BODY = msgpack.packb([[], {"prompt": "x", "sampling_params": GOOD_PARAMS}, EMBED])


def message(body: bytes, **changes: Any) -> dict[str, Any]:
    """Make a Celery message as Redis stores it."""
    request_id = changes.pop("request_id", "odd-request")
    headers = {
        "lang": "py",
        "task": "headrace.generate",
        "id": request_id,
        "root_id": request_id,
        "parent_id": None,
        "group": None,
        "argsrepr": "",
        "kwargsrepr": "",
        "origin": "test",
        "retries": 0,
        "eta": None,
        "expires": None,
        "timelimit": [None, None],
    }
    return {
        "body": base64.b64encode(body).decode(),
        "content-encoding": changes.pop("content_encoding", "binary"),
        "content-type": changes.pop("content_type", "application/x-msgpack"),
        "headers": {**headers, **changes},
        "properties": {
            "correlation_id": request_id,
            "reply_to": "",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": QUEUE},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": "1",
        },
    }
