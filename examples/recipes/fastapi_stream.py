"""Stream an answer as server-sent events, and cancel it when its reader leaves: `uvicorn fastapi_stream:app`."""

import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated

import anyio
from fastapi import Depends, FastAPI, HTTPException
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel

from headrace_broker import (
    AsyncClient,
    HeadraceBrokerError,
    InvalidRequestError,
    QueueFullError,
    QueueUnavailableError,
    RequestFailedError,
)

URL = os.environ.get("HEADRACE_REDIS_URL", "redis://127.0.0.1:6379/0")
MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncClient(URL, model=MODEL) as app.state.client:  # it belongs to the event loop of this process
        yield


app = FastAPI(lifespan=lifespan)


class Question(BaseModel):
    text: str
    max_tokens: int = 64


async def sent(question: Question) -> str:
    """Send the request before the response begins, so that a refusal is a status and not an event."""
    try:
        return await app.state.client.submit(
            messages=[{"role": "user", "content": question.text}],
            sampling_params={"max_tokens": question.max_tokens},
            abandon_after=30,  # seconds: also ends it where this process dies
        )
    except InvalidRequestError as error:
        raise HTTPException(422, str(error)) from error
    except QueueFullError as error:
        seconds = math.ceil(error.retry_after_seconds or 1)  # None: the queue cannot tell
        raise HTTPException(503, "try again later", {"Retry-After": str(seconds)}) from error
    except QueueUnavailableError as error:
        raise HTTPException(503, "try again later") from error


@app.post("/answers", response_class=EventSourceResponse)
async def answer(request_id: Annotated[str, Depends(sent)]) -> AsyncIterator[ServerSentEvent]:
    has_ended = False
    try:
        async for chunk in app.state.client.stream(request_id):
            yield ServerSentEvent(data={"text": chunk.text}, id=chunk.entry_id)
        has_ended = True
        yield ServerSentEvent(event="end", data={"request_id": request_id})
    except RequestFailedError as error:
        has_ended = True
        yield ServerSentEvent(event="end", data={"request_id": request_id, "error": error.code})
    except HeadraceBrokerError:  # Redis is away, or the stream has expired; the message may name Redis's address
        yield ServerSentEvent(event="end", data={"request_id": request_id, "error": "unavailable"})
    finally:
        if not has_ended:  # the reader has left, or the stream was lost
            # The shield keeps the cancellation of this task from ending the call.
            with anyio.CancelScope(shield=True), suppress(HeadraceBrokerError):
                await app.state.client.cancel(request_id)
