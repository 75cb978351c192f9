"""A model that no worker serves: a batch with a line of it cannot end before the test answers that line.

It is the batch's first line, or it might never be sent: answers that wait for a full disk fill the window.
"""

import json
import time

import redis

from headrace_broker.keys import MODELS_KEY, queue_lists, queue_name
from headrace_broker.models.registry import register_model
from headrace_broker.queue.leases import Leases
from headrace_broker.results import Usage
from headrace_broker.streams.writer import StreamWrite, StreamWriter

HELD_MODEL = "held"


def register_held_model(client: "redis.Redis", task: str = "generate") -> None:
    """Register it, and forget what earlier tests have sent to it."""
    for key in client.scan_iter(f"*{queue_name(HELD_MODEL)}*"):
        client.delete(key)
    register_model(client, HELD_MODEL, max_model_len=999, worker="w", seen=time.time(), tasks=(task,))


def forget_held_model(client: "redis.Redis") -> None:
    client.hdel(MODELS_KEY, HELD_MODEL)


def answer_held_line(client: "redis.Redis", row: bytes | None = None) -> None:
    """Play its worker for one request that has not ended, which gets four tokens, or one row of float32."""
    leases, writer = Leases(client, lease_seconds=60, delivery_limit=5), StreamWriter(client, 600)
    is_answered = False
    while not is_answered:
        for message in leases.fetch(queue_lists(queue_name(HELD_MODEL)), 1):
            request_id = json.loads(message.body)["headers"]["id"]
            claim = writer.claim(request_id, "w")
            if claim.ended is None:
                num_done, num_tokens = (4, 4) if row is None else (1, 0)
                chunk = (
                    StreamWrite.chunk(
                        request_id, claim.attempt, 4, index=0, token_ids=[1, 2, 3, 4], text="four", finish_reason="stop"
                    )
                    if row is None
                    else StreamWrite.rows(request_id, claim.attempt, 0, 1, row)
                )
                usage = Usage(3, 0, num_tokens)
                end = StreamWrite.end(request_id, claim.attempt, num_done, finish_reason="stop", usage=usage)
                writer.publish([chunk, end])
                is_answered = True
            leases.ack(message.lease_id)
        time.sleep(0.01)
