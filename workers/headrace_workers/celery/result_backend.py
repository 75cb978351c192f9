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
from headrace_wire.values import is_request_id

CONTENT_TYPE: Final = "headrace_content_type"
"""Key in Celery's map of a request for the content type of its result."""

COMMAND_CONTENT_TYPE: Final[ContextVar[str | None]] = ContextVar("headrace_command_content_type", default=None)
"""The content type of the remote control message that is being answered."""
_RESULT_CONTENT_TYPE: Final[ContextVar[str | None]] = ContextVar("headrace_result_content_type", default=None)
_RELATED_IDS: Final = ("group_id", "parent_id")


class ContentTypeMixin:
    """Stores results in a content type. The backends below inherit from this class first, then from Celery's."""

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
        """Store a result as Celery does, in `content_type` if it is given, otherwise in the request's own."""
        token = _RESULT_CONTENT_TYPE.set(content_type or _content_type_of(task_id, request))
        try:
            return super().store_result(task_id, result, state, traceback, request, **options)  # type: ignore[misc]
        finally:
            _RESULT_CONTENT_TYPE.reset(token)

    def _get_result_meta(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Leave out a group's or parent's id that is no id. Clients may send any value, and some cannot be stored."""
        meta: dict[str, Any] = super()._get_result_meta(*args, **options)  # type: ignore[misc]
        return {name: value for name, value in meta.items() if name not in _RELATED_IDS or is_request_id(value)}

    def encode(self, data: Any) -> bytes:
        return dumps_result(data, answer_type(_RESULT_CONTENT_TYPE.get()))

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        """Get the status of a result only. Any client may have written the rest, and the worker does not need it."""
        stored = self.get(self.get_key_for_task(task_id))  # type: ignore[attr-defined]
        try:
            meta = loads_stored(stored) if stored else None
        except MalformedMessageError:
            meta = None
        status = meta.get("status") if isinstance(meta, dict) else None
        return {"status": status if isinstance(status, str) else PENDING, "result": None}


class RedisBackend(ContentTypeMixin, celery_redis.RedisBackend):
    """Stores results in a server with a URL of its own."""


class SentinelBackend(ContentTypeMixin, celery_redis.SentinelBackend):
    """Stores results in a server behind Sentinels."""


BACKENDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "redis": f"{__name__}:RedisBackend",
        "rediss": f"{__name__}:RedisBackend",
        "sentinel": f"{__name__}:SentinelBackend",
    }
)
"""The backend class for each URL scheme."""


def _content_type_of(task_id: str, request: Any) -> str | None:
    """Get the content type of the given request, of the held request, or of the remote control command."""
    known = getattr(request, CONTENT_TYPE, None)
    if known is None and (held := worker_state.requests.get(task_id)) is not None:
        known = held.content_type
    return known or COMMAND_CONTENT_TYPE.get()
