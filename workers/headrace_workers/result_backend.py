"""Celery's Redis result backend, which stores each result in the content type of its request."""

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final

from celery.backends import redis as celery_redis
from celery.states import PENDING
from celery.worker import state as worker_state

from headrace_broker.content import answer_type, dumps_result, loads_stored
from headrace_broker.errors import MalformedMessageError

CONTENT_TYPE: Final = "headrace_content_type"
"""Where Celery's map of a request says what its result is to be stored in."""

ASKED_IN: Final[ContextVar[str | None]] = ContextVar("headrace_asked_in", default=None)
"""The content type of the remote control message that is being answered."""
_STORED_IN: Final[ContextVar[str | None]] = ContextVar("headrace_stored_in", default=None)


class ResultsByContent:
    """What the backends of this module have in common; goes before Celery's class."""

    def store_result(
        self,
        task_id: str,
        result: Any,
        state: str,
        traceback: Any = None,
        request: Any = None,
        *,
        content_type: str | None = None,
        **options: Any,
    ) -> Any:
        """Store as Celery does, in `content_type` where that is given, otherwise in the request's own."""
        token = _STORED_IN.set(content_type or _content_type_of(task_id, request))
        try:
            return super().store_result(task_id, result, state, traceback, request, **options)  # type: ignore[misc]
        finally:
            _STORED_IN.reset(token)

    def encode(self, data: Any) -> bytes:
        return dumps_result(data, answer_type(_STORED_IN.get()))

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        """Say whether there is a result. Nothing else of it is wanted here, and a stranger may have written it."""
        stored = self.get(self.get_key_for_task(task_id))  # type: ignore[attr-defined]
        try:
            meta = loads_stored(stored) if stored else None
        except MalformedMessageError:
            meta = None
        status = meta.get("status") if isinstance(meta, dict) else None
        return {"status": status if isinstance(status, str) else PENDING, "result": None}


class RedisBackend(ResultsByContent, celery_redis.RedisBackend):
    """For a server with a URL of its own."""


class SentinelBackend(ResultsByContent, celery_redis.SentinelBackend):
    """For a server behind Sentinels."""


BACKENDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "redis": f"{__name__}:RedisBackend",
        "rediss": f"{__name__}:RedisBackend",
        "sentinel": f"{__name__}:SentinelBackend",
    }
)
"""Which class Celery takes for the scheme of a URL."""


def _content_type_of(task_id: str, request: Any) -> str | None:
    """Of the request that is given or that this worker holds, or else of the command that made Celery store this."""
    known = getattr(request, CONTENT_TYPE, None)
    if known is None and (held := worker_state.requests.get(task_id)) is not None:
        known = held.content_type
    return known or ASKED_IN.get()
