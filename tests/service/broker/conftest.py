"""Fixtures of the fair-share tests."""

from collections.abc import Callable
from typing import Any

import pytest
import redis

from headrace_broker.queue.fair_share import FairShare
from headrace_broker.queue.leases import Leases


@pytest.fixture
def make_leases(redis_client: "redis.Redis") -> Callable[..., Leases]:
    """Return a function that makes one worker's leases with these fair-share settings. They outlast any test."""

    def make(**policy: Any) -> Leases:
        return Leases(redis_client, lease_seconds=60, delivery_limit=5, fair_share=FairShare(**policy))

    return make
