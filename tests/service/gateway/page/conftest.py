"""A browser, and gateways whose outputs the test writes."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from headrace_broker.models.registry import register_model
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer, free_port
from headrace_gateway.keys.api_key import ApiKey
from service.gateway.page.scripted import MODEL, Script, ScriptedGateway

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser"))), None)
PATIENCE = 60_000
"""Milliseconds; only a failing test waits this long."""
ANSWER = ".answer .markdown"
"""Selects the texts of a conversation's answers."""


# not of the session: Playwright runs an event loop in this thread, in which no test of coroutines can run
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("no Chromium is installed; `make browser` gets one where it can be had")
    # without a user namespace of its own, as in a container, Chromium's sandbox does not start under root
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=BROWSER, args=arguments) as started,
    ):
        yield started


@dataclass
class Watched:
    """A page, and the errors that must not occur while it is used."""

    page: Page
    faults: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def watch(self) -> None:
        def console(message: ConsoleMessage) -> None:
            # the browser itself logs a line for each error response
            if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
                self.faults.append(message.text)

        self.page.on("console", console)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    with browser.new_context() as context:
        context.set_default_timeout(PATIENCE)
        watched = Watched(context.new_page())
        watched.watch()
        yield watched
    assert watched.faults == []


@pytest.fixture
def page(watched: Watched) -> Page:
    """An empty page; violations of the policy, errors of scripts and warnings fail the test."""
    return watched.page


@pytest.fixture
def script() -> Script:
    return Script()


MakeGateway = Callable[..., ScriptedGateway]


@pytest.fixture
def make_gateway(redis_server: EmbeddedServer, script: Script) -> Iterator[MakeGateway]:
    """Makes gateways with the script."""
    with ExitStack() as stack:

        def make(*, keys: dict[str, ApiKey] | None = None) -> ScriptedGateway:
            with connect(redis_server.url) as client:
                register_model(client, MODEL, max_model_len=2048, worker="worker@host", seen=time.time())
            return stack.enter_context(ScriptedGateway(script, redis_server.url, free_port(), keys=keys))

        yield make


@pytest.fixture
def scripted(make_gateway: MakeGateway) -> ScriptedGateway:
    """One gateway without keys."""
    return make_gateway()
