"""Messages of priority steps between those of the workers."""

import redis

from headrace_broker.keys import PRIORITY_SEPARATOR, queue_lists
from headrace_broker.queue.unread_lists import gather_steps
from service.broker.tenant_messages import QUEUE


def test_messages_move_in_order_past_a_key_of_another_type_and_are_not_sent_to_the_worker(
    redis_client: "redis.Redis",
) -> None:
    bodies = [bytes([65 + number]) * 300_000 for number in range(5)]
    redis_client.set(f"{QUEUE}{PRIORITY_SEPARATOR}1", "x")
    redis_client.lpush(f"{QUEUE}{PRIORITY_SEPARATOR}4", *bodies)
    sent = redis_client.info("stats")["total_net_output_bytes"]
    assert gather_steps(redis_client, [QUEUE]) == 4  # a mebibyte
    assert redis_client.info("stats")["total_net_output_bytes"] - sent < 100_000
    assert gather_steps(redis_client, [QUEUE]) == 1
    assert gather_steps(redis_client, [QUEUE]) == 0
    assert redis_client.lrange(queue_lists(QUEUE)[1], 0, -1) == bodies[::-1]
