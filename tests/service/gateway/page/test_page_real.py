"""The page with a real gateway and a real worker."""

import re

import httpx2
import pytest
from playwright.sync_api import Page, expect

from service.gateway.conftest import RunningGateway
from service.gateway.page.conftest import ANSWER, PATIENCE

expect.set_options(timeout=2 * PATIENCE)


def test_the_playground_shows_the_answer_and_its_times(page: Page, gateway: RunningGateway) -> None:
    page.goto(gateway.url)
    expect(page.locator("#play-model")).to_have_value(gateway.model)
    page.get_by_label("Max tokens").first.fill("8")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#play-state")).to_have_text("finished")
    expect(page.locator(ANSWER)).not_to_be_empty()
    expect(page.locator("#play-queued")).to_have_text(re.compile(r"^\d"))
    expect(page.locator("#play-prompt")).to_have_text(re.compile(r"^\d+"))
    expect(page.locator("#play-problem")).to_be_hidden()


def test_a_schema_is_followed(page: Page, gateway: RunningGateway) -> None:
    page.goto(gateway.url)
    page.get_by_text("JSON schema").click()
    page.locator("#play-schema").fill('{"enum": ["red", "green"]}')
    page.get_by_role("button", name="Send").click()
    expect(page.locator(ANSWER)).to_have_text(re.compile('^"(red|green)"$'))


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
