"""A hub moves its readers from a server that has lost its streams, while subscribers come and go."""

from typing import Any
from unittest.mock import AsyncMock, Mock

from headrace_broker.streams.hub import StreamHub, _Place


async def test_a_subscriber_that_leaves_meanwhile_stops_no_other_reader() -> None:
    servers = Mock(of_table=AsyncMock(), is_lost=Mock(return_value=True), lost_at=Mock(return_value=5))
    hub: Any = StreamHub(servers)
    hub._hubs["s1"] = Mock()
    for request_id in ("first", "leaves", "last"):
        hub._places[request_id] = _Place(homes={"s1"})
        hub._subscriptions[request_id] = Mock(is_paused=False)
    joined = []

    async def join(last_ids: dict[str, str | None]) -> None:
        joined.extend(last_ids)
        if "leaves" in hub._places:
            del hub._subscriptions["leaves"], hub._places["leaves"]

    hub.join = join
    await hub.leave_if_lost("s1")
    assert joined == ["first", "last"]
    assert list(hub._places) == ["first", "last"]
