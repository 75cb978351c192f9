"""Stream an answer as server-sent events, and cancel it when its reader leaves: `uvicorn fastapi_stream:app`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import anyio
from fastapi import Depends, FastAPI, HTTPException
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel

from headrace_broker import AsyncClient, InvalidRequestError, QueueFullError, RequestFailedError

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
        raise HTTPException(503, "try again later", {"Retry-After": str(int(error.retry_after_seconds))}) from error


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
    finally:
        if not has_ended:  # the reader has left
            with anyio.CancelScope(shield=True):  # or the cancellation of this task would end the call
                await app.state.client.cancel(request_id)
