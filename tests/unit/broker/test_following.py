"""For how long a stream that a client follows may have no entry."""

from unittest.mock import Mock

import pytest

from headrace_broker.streams import following, hub
from headrace_broker.streams.events import ChunkEvent


def test_an_entry_whose_output_came_before_ends_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Mock(monotonic=Mock(return_value=0.0))
    for module in (following, hub):
        monkeypatch.setattr(module, "time", clock)
    subscription = hub.Subscription(Mock(), {"r": None})
    limit = following._Timeout(subscription, 10.0)
    for seconds, entry_id in ((0.0, "1-1"), (9.0, "2-1")):
        clock.monotonic.return_value = seconds
        subscription.put("r", ChunkEvent(entry_id, 1, 1, 0, [7], "t"))
    clock.monotonic.return_value = 18.0
    assert (limit.wait_seconds(), limit.error()) == (1.0, None)
    clock.monotonic.return_value = 19.0
    assert limit.wait_seconds() == 0.0
    assert limit.error() is not None
