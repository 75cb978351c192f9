"""What a worker tells clients while it is loading its model."""

import time

import redis
import structlog

from headrace_broker import LoadingModel
from headrace_broker.keys import LOADING_KEY, LOADING_SECONDS
from headrace_broker.models.loading_models import read_loading
from unit.workers.desk import Desk
from unit.workers.fakes import CAPABILITIES, MODEL


def loading(desk: Desk) -> LoadingModel | None:
    return read_loading(desk.redis.loading, time.time()).get("tiny")


def lost() -> Desk:
    """Return a dispatcher whose engine has died, so that the worker loads the model again."""
    desk = Desk()
    desk.watch.on_engine_lost("killed", "crash", was_ready=True)
    desk.engine.is_ready = False
    return desk


def test_the_progress_is_reported_until_the_engine_is_ready() -> None:
    desk = lost()
    desk.watch.report_loading()
    found = loading(desk)
    assert found is not None
    assert (found.progress, found.workers) == (0.0, {"w"})
    assert desk.redis.milliseconds_left[LOADING_KEY] == 1000 * LOADING_SECONDS
    desk.watch.on_engine_loading(0.25)
    desk.watch.report_loading()
    found = loading(desk)
    assert found is not None
    assert found.progress == 0.25
    desk.engine.is_ready = True
    desk.watch.on_engine_ready(MODEL, CAPABILITIES)
    assert loading(desk) is None
    desk.watch.report_loading()
    assert loading(desk) is None


def test_a_second_load_begins_at_nothing_and_after_the_last_registration() -> None:
    desk = lost()
    desk.watch.on_engine_loading(0.75)
    desk.watch.on_engine_lost("killed", "crash", was_ready=False)
    before = time.time()
    desk.watch.on_engine_lost("killed", "crash", was_ready=False)
    desk.watch.report_loading()
    found = loading(desk)
    assert found is not None
    assert found.progress == 0.0
    assert found.since >= before


def test_a_worker_that_drains_reports_nothing_and_one_that_ends_deletes_its_report() -> None:
    desk = lost()
    desk.watch.report_loading()
    desk.dispatcher.drain("test")
    desk.dispatcher.stop()
    assert loading(desk) is None
    desk.watch.report_loading()
    assert loading(desk) is None


def test_a_report_that_redis_refuses_stops_nothing() -> None:
    desk = lost()
    desk.redis.error = redis.ConnectionError("gone")
    desk.watch.report_loading()
    desk.watch.stop()
    desk.redis.error = None
    desk.watch.report_loading()
    assert loading(desk) is not None


def test_a_report_that_redis_does_not_permit_is_logged_once() -> None:
    desk = lost()
    desk.redis.error = redis.exceptions.NoPermissionError("User w has no permissions to access the key")
    with structlog.testing.capture_logs() as logged:
        desk.watch.report_loading()
        desk.watch.report_loading()
    assert [entry["event"] for entry in logged] == ["loading report refused"]
