"""What a request sends when it ends, as Redis has it afterwards."""

import redis

from headrace_broker.keys import sent_key
from headrace_broker.queue.final_writes import FinalWrites


def send(redis_client: redis.Redis, content: str) -> None:
    writes = FinalWrites()
    writes.push("shop", 0, b"message")
    writes.once("r", content)
    writes.make(redis_client)


def test_a_copy_of_a_message_sends_nothing_and_another_message_with_its_id_does(redis_client: redis.Redis) -> None:
    for content in ("a" * 48, "a" * 48, "a" * 32, "b" * 48):
        send(redis_client, content)
    assert redis_client.llen("shop") == 2
    assert 0 < redis_client.ttl(sent_key("r")) <= 86_400


def test_a_result_without_an_expiry_is_stored_once(redis_client: redis.Redis) -> None:
    for value in (b"first", b"second"):
        writes = FinalWrites()
        writes.answer("celery-task-meta-r", value, 0)
        writes.make(redis_client)
    assert redis_client.get("celery-task-meta-r") == b"first"
    assert redis_client.ttl("celery-task-meta-r") == -1
