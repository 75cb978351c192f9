"""A worker that is the only one of its queues takes more requests before a step of its engine."""

from fleet.workers import sleeping_service
from headrace_broker import Client
from headrace_broker.keys import leases_key
from service.broker.test_wake_ups import until

QUANTUM = 4
"""The default of --fetch-quantum."""


def test_a_lone_worker_takes_more_requests_before_the_next_step() -> None:
    with sleeping_service(step_seconds=600.0) as service, Client(service.url, model="tiny") as client:
        service.start_workers(1)
        limit = 1 + QUANTUM  # one is in the engine's step, which does not end

        def takes_more() -> bool:
            client.submit("x", {"max_tokens": 1})
            return service.client.zcard(leases_key("headrace.tiny")) > limit

        until(takes_more)
