"""A result that cannot be stored is not acknowledged, whatever Celery's tracer reports."""

import warnings
from typing import Any

import pytest
import redis
from celery import Celery
from celery.app.trace import build_tracer

from headrace_workers.celery.task import OUTCOME, GenerateTask
from headrace_workers.settings import WorkerSettings


def test_a_result_that_cannot_be_stored_raises_and_stores_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery("test", backend="cache+memory://", set_as_current=False)
    task = app.register_task(GenerateTask(WorkerSettings(model="/m")))
    stored: list[str] = []

    def store(_id: str, _result: Any, state: str, *_: Any, **__: Any) -> None:
        if not stored:
            stored.append("refused")
            raise redis.ConnectionError("gone for a moment")
        stored.append(state)

    monkeypatch.setattr(app.backend, "store_result", store)
    OUTCOME.set({"request_id": "r1"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # Celery's own warning about the error that it caught
        traced = build_tracer(task.name, task, app=app)("r1", [], {}, {"id": "r1", "delivery_info": {}})
    assert stored == ["refused"]
    assert traced.info is not None  # so that the message is not acknowledged
    app.close()
