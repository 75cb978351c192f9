"""One log format, and no prompt in it."""

from __future__ import annotations

import io
import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from celery.app import trace
from celery.concurrency.base import BasePool
from celery.worker.consumer import consumer

from headrace_monitoring.errors import LogLevelError
from headrace_monitoring.logging import PRIVATE_KEYS, configure_logging, process_fields, set_level

SECRET = "the butler did it"

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    configure_logging()  # which closes the file of an earlier call
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def lines(stream: io.StringIO) -> Lines:
    configure_logging("debug", json=True, stream=stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_warning_of_python_is_a_line_of_the_log(lines: Lines) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("a superuser runs the worker", RuntimeWarning, stacklevel=1)
    [line] = lines()
    assert "RuntimeWarning: a superuser runs the worker" in line["event"]
    assert line["level"] == "warning"


def test_our_loggers_and_the_standard_ones_come_out_alike(lines: Lines) -> None:
    structlog.get_logger("headrace_workers").info("engine ready", slots=8)
    logging.getLogger("celery.worker").warning("lost %s", "contact")
    ours, theirs = lines()
    assert (ours["event"], ours["level"], ours["logger"], ours["slots"]) == (
        "engine ready",
        "info",
        "headrace_workers",
        8,
    )
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("lost contact", "warning", "celery.worker")
    assert ours["timestamp"].endswith("Z")
    assert theirs["timestamp"].endswith("Z")


def test_context_is_on_every_line(lines: Lines) -> None:
    structlog.contextvars.bind_contextvars(worker="w1")
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        logging.getLogger("redis").error("timeout")
    structlog.get_logger().info("idle")
    inside, outside = lines()
    assert (inside["worker"], inside["request_id"]) == ("w1", "r1")
    assert outside["worker"] == "w1"
    assert "request_id" not in outside


@pytest.mark.parametrize("key", sorted(PRIVATE_KEYS))
def test_private_keys_are_dropped_and_named(lines: Lines, stream: io.StringIO, key: str) -> None:
    structlog.get_logger().info("received", **{key: SECRET}, size=17)
    structlog.get_logger().info("received", message={"deep": [{key: SECRET}]})
    assert SECRET not in stream.getvalue()
    flat, deep = lines()
    assert (flat["dropped_keys"], flat["size"]) == ([key], 17)
    assert deep["dropped_keys"] == [key]


def test_an_object_is_shown_by_its_type(lines: Lines, stream: io.StringIO) -> None:
    class Request:
        def __repr__(self) -> str:
            return SECRET

    structlog.get_logger().info("refused", request=Request(), body_bytes=SECRET.encode())
    assert SECRET not in stream.getvalue()
    assert lines()[0]["request"] == "<Request>"


def test_a_traceback_shows_no_local_variables(stream: io.StringIO) -> None:
    for as_json in (True, False):
        configure_logging("INFO", json=as_json, stream=stream)
        prompt = SECRET.upper()
        try:
            raise ValueError(f"prompt of {len(prompt)} characters is too long")
        except ValueError:
            structlog.get_logger().exception("refused")
            logging.getLogger("kombu").exception("refused")
    assert SECRET.upper() not in stream.getvalue()
    assert stream.getvalue().count("prompt of 17 characters is too long") == 4


def test_celery_cannot_log_a_result(lines: Lines, stream: io.StringIO) -> None:
    values = {"name": "headrace.generate", "id": "r1", "runtime": 1.5, "return_value": SECRET, "args": SECRET}
    logging.getLogger("celery.app.trace").info(trace.LOG_SUCCESS, values)
    assert SECRET not in stream.getvalue()
    assert lines()[0]["event"] == "Task headrace.generate[r1] succeeded in 1.5s: [removed]"


@pytest.mark.parametrize(
    ("template", "arguments", "kept"),
    [
        (consumer.UNKNOWN_TASK_ERROR, ("other.task", SECRET, SECRET, SECRET, "queue"), "type other.task"),
        (consumer.UNKNOWN_FORMAT, (SECRET,), "Received and deleted unknown message"),
        (consumer.INVALID_TASK_ERROR, ("no id", SECRET), "Received invalid task message: no id"),
        (consumer.MESSAGE_DECODE_ERROR, (ValueError(SECRET), "t", "e", SECRET, SECRET), ""),
    ],
)
def test_celery_cannot_dump_a_message(
    lines: Lines, stream: io.StringIO, template: str, arguments: tuple[object, ...], kept: str
) -> None:
    logging.getLogger("celery.worker.consumer.consumer").error(template, *arguments)
    assert SECRET not in stream.getvalue()
    assert kept in lines()[0]["event"]
    assert lines()[0]["event"].endswith("[removed]")


def test_celery_cannot_debug_arguments(lines: Lines, stream: io.StringIO) -> None:
    pool = BasePool()
    pool._does_debug = True
    pool.on_apply = lambda *_, **__: None
    pool.apply_async(print, (SECRET,), {"prompt": SECRET})
    assert SECRET not in stream.getvalue()
    assert lines()[0]["event"].startswith("TaskPool: Apply")


def test_a_level_below_the_chosen_one_is_silent(stream: io.StringIO) -> None:
    configure_logging("WARNING", json=True, stream=stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("celery").info("quiet")
    assert stream.getvalue() == ""


def test_configuring_twice_does_not_log_twice(stream: io.StringIO) -> None:
    configure_logging(json=True, stream=io.StringIO())
    configure_logging(json=True, stream=stream)
    structlog.get_logger().info("once")
    assert len(stream.getvalue().splitlines()) == 1


def test_a_terminal_gets_readable_lines_and_anything_else_json() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, is_json in ((Terminal(), False), (io.StringIO(), True)):
        configure_logging(stream=stream)
        structlog.get_logger().info("hello", prompt=SECRET)
        assert stream.getvalue().startswith("{") is is_json
        assert SECRET not in stream.getvalue()


def test_an_unknown_level_is_refused_by_name() -> None:
    with pytest.raises(LogLevelError, match="the log level must be one of DEBUG, INFO"):
        configure_logging("loud")


def test_the_level_changes_while_the_process_runs(lines: Lines) -> None:
    log = logging.getLogger("anything")
    assert set_level("warning") == "DEBUG"
    log.info("not shown")
    structlog.get_logger("ours").info("not shown")
    assert set_level("INFO") == "WARNING"
    log.info("shown")
    assert [line["event"] for line in lines()] == ["shown"]
    for level in ("loud", None, 10):
        with pytest.raises(LogLevelError):
            set_level(level)  # type: ignore[arg-type]


def test_fields_of_the_process_are_on_every_line_of_every_thread(lines: Lines) -> None:
    process_fields.set(worker="w1")
    try:
        threads = [threading.Thread(target=structlog.get_logger("ours").info, args=("from a thread",))]
        threads.append(threading.Thread(target=logging.getLogger("theirs").info, args=("from another",)))
        for thread in threads:
            thread.start()
            thread.join()
    finally:
        process_fields.set()
    assert [line["worker"] for line in lines()] == ["w1", "w1"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ESCAPE = "\x1b["


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_gets_colours_unless_its_user_refuses_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    for name, value in {"TERM": "xterm", "NO_COLOR": "", **variables}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    configure_logging(stream=terminal)
    structlog.get_logger("x").warning("engine ready", slots=8)
    assert (ESCAPE in terminal.getvalue()) == coloured
    assert "slots" in terminal.getvalue()
    terminal = Terminal()
    configure_logging(stream=terminal, colours=False)
    structlog.get_logger("x").warning("engine ready", slots=8)
    assert ESCAPE not in terminal.getvalue()


def test_what_is_no_terminal_gets_no_colours_whatever_the_format(stream: io.StringIO, tmp_path: Path) -> None:
    for as_json in (True, False):
        configure_logging(json=as_json, stream=stream)
        structlog.get_logger("x").warning("engine ready", slots=8)
        configure_logging(json=as_json, stream=Terminal(), file=str(tmp_path / "log"))
        try:
            raise ValueError("x")
        except ValueError:
            logging.getLogger("y").exception("lost")
    assert ESCAPE not in stream.getvalue()
    assert ESCAPE not in (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text().count("lost") == 2


def test_a_log_file_is_opened_anew_after_it_was_renamed(tmp_path: Path) -> None:
    file = tmp_path / "log"
    configure_logging(file=str(file))
    logging.getLogger("y").warning("one")
    file.rename(tmp_path / "log.1")
    logging.getLogger("y").warning("two")
    assert json.loads(file.read_text())["event"] == "two"
