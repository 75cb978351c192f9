"""FastAPI: a stream that is read to its end, one whose reader leaves, and a request that is refused."""

import json
from typing import Any
from unittest.mock import AsyncMock

import anyio
import fastapi_stream
import msgpack
from checks import Site, check, main, same
from fastapi import HTTPException
from processes import NewStreams, answer, events, served, status_of, until

from headrace_broker import QueueFullError

JSON = {"Content_Type": "application/json"}


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@check("server-sent events to the end; a refusal is a status")
def whole(_site: Site) -> None:
    with served("fastapi_stream:app") as url:
        with answer(f"{url}/answers", body(text="Name three rivers.", max_tokens=16), **JSON) as response:
            same(response.headers["content-type"].partition(";")[0], "text/event-stream")
            *chunks, end = events(response)
        same(end["event"], "end")
        assert "error" not in end["data"]
        assert "".join(event["data"]["text"] for event in chunks)
        same(status_of(f"{url}/answers", body(text="Hello", max_tokens=-1), **JSON), 422)


@check("the request of a reader who leaves is cancelled")
def left(site: Site) -> None:
    streams = NewStreams(site.redis_url)
    with served("fastapi_stream:app") as url:
        with answer(
            f"{url}/answers", body(text="Describe a mill wheel at length.", max_tokens=1500), **JSON
        ) as response:
            next(events(response))
        [request_id] = streams.ids()

        def end() -> dict[str, Any] | None:
            kind, data = streams.entries(request_id)[-1]
            return msgpack.unpackb(data) if kind == "end" else None

        found = until(end, "end of the stream")
        same(found["finish_reason"], "cancelled")
        same(found["error"]["message"], "the client cancelled the request")  # not: no reader for 30 s


@check("a lost stream ends with an error, a full queue that cannot tell when with a Retry-After of 1 s")
def lost(site: Site) -> None:
    streams = NewStreams(site.redis_url)
    with served("fastapi_stream:app") as url:
        question = body(text="Describe a mill wheel at length.", max_tokens=1500)
        with answer(f"{url}/answers", question, **JSON) as response:
            found = events(response)
            next(found)
            [request_id] = streams.ids()
            streams.redis.delete(f"headrace:stream:{request_id}")
            same([*found][-1], {"event": "end", "data": {"request_id": request_id, "error": "unavailable"}})

    fastapi_stream.app.state.client = AsyncMock()
    fastapi_stream.app.state.client.submit.side_effect = QueueFullError("model", 1, 1, None)
    try:
        anyio.run(fastapi_stream.sent, fastapi_stream.Question(text="Hello"))
    except HTTPException as refusal:
        same((refusal.status_code, refusal.headers), (503, {"Retry-After": "1"}))
    else:
        raise AssertionError("a full queue refused nothing")


if __name__ == "__main__":
    main("fastapi")
