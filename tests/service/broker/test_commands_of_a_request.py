"""How many commands of Redis the scripts of a request run: each takes Redis about a microsecond."""

from collections.abc import Callable

import redis

from headrace_broker.queue.leases import Leases
from headrace_broker.results import Usage
from headrace_broker.usage.entry import UsageEntry
from service.broker.tenant_messages import LISTS, numbered, push


def num_commands(client: "redis.Redis", call: Callable[[], object]) -> int:
    """Return how many commands Redis runs in a call, those of scripts included."""
    client.config_resetstat()
    call()
    stats = client.info("commandstats")
    return int(sum(each["calls"] for name, each in stats.items() if name != "cmdstat_config|resetstat"))


def test_a_fetch_and_an_acknowledgement_run_few_commands(redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5, usage_days=1, result_seconds=60)
    push(redis_client, "a", numbered("m", 20))
    leases.sort(LISTS)
    leases.fetch(LISTS, 1)  # loads the script
    held = []
    one = num_commands(redis_client, lambda: held.extend(leases.fetch(LISTS, 1)))
    four = num_commands(redis_client, lambda: held.extend(leases.fetch(LISTS, 4)))
    assert len(held) == 5
    for message in held:
        leases.hold(message.lease_id, message)
        leases.cost(message.lease_id, 65, UsageEntry("completions", "", Usage(64, 0, 1)))
    leases.ack(held[0].lease_id)  # loads the script
    ack = num_commands(redis_client, lambda: leases.ack(held[1].lease_id))
    assert one <= 60
    assert four - one <= 3 * 21
    assert ack <= 28
