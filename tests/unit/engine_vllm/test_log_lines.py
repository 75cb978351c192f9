"""vLLM's log lines lose what a request brought."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from headrace_engine_vllm.log_lines import WithoutRequests

SECRET = "xylophone"


@pytest.fixture
def kept(caplog: pytest.LogCaptureFixture) -> Iterator[WithoutRequests]:
    kept = WithoutRequests()
    caplog.handler.addFilter(kept)
    with caplog.at_level(logging.DEBUG):
        yield kept
    caplog.handler.removeFilter(kept)


def test_before_there_are_requests_lines_are_whole(kept: WithoutRequests, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm.config").info("model %s", SECRET)
    assert caplog.messages == [f"model {SECRET}"]


def test_afterwards_values_texts_and_tracebacks_are_left_out(
    kept: WithoutRequests, caplog: pytest.LogCaptureFixture
) -> None:
    kept.is_serving = True
    logger = logging.getLogger("vllm.v1.scheduler")
    logger.info("scheduled %s", SECRET)
    logger.error("grammar rejected tokens %s", [SECRET])
    logger.error(f"100 % of {SECRET}")
    try:
        raise ValueError(SECRET)
    except ValueError:
        logger.exception("Failed to compile grammar for request %s", SECRET)
    assert SECRET not in caplog.text
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "grammar rejected tokens %s",
        "a message",
        "Failed to compile grammar for request %s",
    ]
    assert "ValueError" in caplog.messages[2]


def test_headraces_own_lines_stay(kept: WithoutRequests, caplog: pytest.LogCaptureFixture) -> None:
    kept.is_serving = True
    logging.getLogger("headrace_engine.core.serving").error("the engine stops at %s", "a line")
    assert caplog.messages == ["the engine stops at a line"]
