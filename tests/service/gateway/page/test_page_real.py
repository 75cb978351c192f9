"""The page with a real gateway and a real worker."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from playwright.sync_api import Page, expect

from headrace_broker.embedded import free_port
from headrace_gateway.key_file import new_key
from service.gateway.conftest import RunningGateway
from service.gateway.gateway_process import GatewayProcess
from service.gateway.page.conftest import PATIENCE

expect.set_options(timeout=2 * PATIENCE)


def test_the_playground_answers(page: Page, gateway: RunningGateway) -> None:
    page.goto(gateway.url)
    expect(page.locator("#play-model")).to_have_value(gateway.model)
    page.get_by_label("Max tokens").first.fill("8")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#play-state")).to_have_text("finished")
    expect(page.locator("#play-output")).not_to_be_empty()
    expect(page.locator("#play-queued")).to_have_text(re.compile(r"^\d"))
    expect(page.locator("#play-prompt")).to_have_text(re.compile(r"^\d+"))
    expect(page.locator("#play-problem")).to_be_hidden()


def test_a_schema_is_followed(page: Page, gateway: RunningGateway) -> None:
    page.goto(gateway.url)
    page.get_by_text("JSON schema").click()
    page.locator("#play-schema").fill('{"enum": ["red", "green"]}')
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#play-output")).to_have_text(re.compile('^"(red|green)"$'))


def test_a_stream_is_cut_rejoined_and_read_twice(page: Page, gateway: RunningGateway) -> None:
    page.goto(f"{gateway.url}/#rejoin")
    expect(page.locator("#join-model")).to_have_value(gateway.model)
    page.get_by_label("Max tokens").last.fill("200")
    page.get_by_label("Cut after tokens").fill("20")
    page.get_by_role("button", name="Start a stream").click()
    expect(page.locator("#join-state")).to_have_text("cut")
    expect(page.locator("#join-cursor")).to_have_text(re.compile(r"^1-\d+\.\d+$"))
    page.get_by_role("button", name="Open a second reader").click()
    page.get_by_role("button", name="Rejoin", exact=True).click()
    expect(page.locator("#join-verdict")).to_contain_text("over 2 connections")
    expect(page.locator("#join-verdict")).to_contain_text("No token was lost or doubled.")
    expect(page.locator("#join-second-state")).to_contain_text("finished")
    assert page.locator("#join-second-output").text_content() == page.locator("#join-output").text_content()


def test_the_queue_shows_the_worker_and_a_finished_request(page: Page, gateway: RunningGateway) -> None:
    page.goto(gateway.url)
    page.get_by_label("Max tokens").first.fill("4")
    with page.expect_response("**/v1/chat/completions") as answer:
        page.get_by_role("button", name="Send").click()
    expect(page.locator("#play-state")).to_have_text("finished")
    page.get_by_role("tab", name="Queue").click()
    expect(page.locator("#queue-table")).to_contain_text(gateway.model)
    expect(page.locator("#queue-table tbody td").last).to_contain_text("now")
    page.get_by_label("Request id").fill(answer.value.all_headers()["x-headrace-id"])
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#one-result")).to_have_text(re.compile(r"^finished \((stop|length)\), [1-4] tokens$"))


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
def test_other_sites_reach_no_endpoint_of_a_gateway_without_keys(
    gateway: RunningGateway, headers: dict[str, str]
) -> None:
    with httpx2.Client(base_url=gateway.url, headers=headers) as http:
        for path in ("/", "/v1/models", "/headrace/overview", "/headrace/dead-letters"):
            assert http.get(path).status_code == 403
        for path in ("/v1/chat/completions", "/headrace/dead-letters/purge"):
            answer = http.post(path, json={})
            assert answer.status_code == 403
            assert answer.json()["error"]["type"] == "permission_error"


@pytest.fixture
def pair(gateway: RunningGateway, tmp_path: Path) -> Iterator[tuple[list[GatewayProcess], str]]:
    """Two replicas with keys that allow each other's origin, and a key."""
    key, entry = new_key("team")
    (tmp_path / "keys.toml").write_text(entry, encoding="utf-8")
    ports = [free_port(), free_port()]
    origins = " ".join(f"http://127.0.0.1:{port}" for port in ports)
    replicas: list[GatewayProcess] = []
    try:
        for port in ports:
            options = {"keys": tmp_path / "keys.toml", "allow_origin": origins}
            log = tmp_path / f"{port}.log"
            replicas.append(GatewayProcess(redis_url=gateway.service.url, log=log, port=port, **options))
        yield [replica.wait_ready() for replica in replicas], key
    finally:
        for replica in replicas:
            replica.close()


def test_a_stream_whose_gateway_was_killed_is_rejoined_at_another_replica(
    page: Page, pair: tuple[list[GatewayProcess], str]
) -> None:
    (first, second), key = pair
    page.goto(f"{first.url}/#rejoin")
    expect(page.locator("#key-note")).to_have_text("The gateway asks for an API key.")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use").click()
    expect(page.locator("#join-model")).not_to_have_value("")
    page.get_by_label("Cut after tokens").fill("20")
    page.get_by_role("button", name="Start a stream").click()
    expect(page.locator("#join-state")).to_have_text("cut")
    first.kill()
    page.get_by_role("button", name="Rejoin", exact=True).click()
    expect(page.locator("#join-problem")).to_have_text("The gateway does not answer.")
    page.get_by_label("Another replica").fill(second.url)
    page.get_by_role("button", name="Rejoin there").click()
    expect(page.locator("#join-verdict")).to_contain_text("No token was lost or doubled.")
    expect(page.locator("#join-connections li").last).to_contain_text(second.url)
    expect(page.locator("#join-problem")).to_be_hidden()
