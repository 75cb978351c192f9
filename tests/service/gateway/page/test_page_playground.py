"""The playground in a real browser."""

import json
import re

import pytest
from playwright.sync_api import Browser, Page, expect

from headrace_broker import Client
from headrace_broker.server.embedded import EmbeddedServer
from headrace_gateway.keys.api_key import ApiKey
from service.gateway.page.conftest import ANSWER, PATIENCE, MakeGateway, Watched
from service.gateway.page.scripted import ID, MODEL, Script, ScriptedGateway

expect.set_options(timeout=PATIENCE)

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\n& <b>bold</b>"


def test_an_answer_streams_into_the_page_with_its_figures(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    script.allowed = 2
    page.goto(scripted.url)
    page.get_by_label("System message").fill("be brief")
    page.locator("#play-user").fill("why?")
    page.get_by_label("Max tokens").first.fill("16")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(ANSWER)).to_have_text("The sky ")
    expect(page.locator("#play-state")).to_have_text("streaming")
    script.allowed = 4
    expect(page.locator("#play-state")).to_have_text("finished")
    assert page.locator(ANSWER).text_content() == "The sky is blue."
    expect(page.locator("#play-queued")).to_have_text("1.2 s")
    expect(page.locator("#play-first")).to_have_text(re.compile(r"\d+(\.\d+)? m?s"))
    expect(page.locator("#play-rate")).to_have_text(re.compile(r"\d+\.\d"))
    expect(page.locator("#play-prompt")).to_have_text("7 (4 cached)")
    expect(page.locator("#play-tokens")).to_have_text("4")
    expect(page.locator("#play-finish")).to_have_text("stop")
    [body] = script.bodies
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == (MODEL, 16, 0.7, True)
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]


def test_events_are_shown_as_they_came_and_the_request_as_curl(page: Page, scripted: ScriptedGateway) -> None:
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as on plain HTTP
    page.goto(scripted.url)
    page.locator("#play-user").fill("it's 'quoted'")
    page.get_by_text("As curl").click()
    page.get_by_text("Server-sent events").click()
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#play-raw")).to_contain_text("data: [DONE]")
    expect(page.locator("#play-raw")).to_contain_text('"content":"sky "')
    command = page.locator("#play-curl").text_content() or ""
    assert f"{scripted.url}/v1/chat/completions" in command
    assert "it'\\''s '\\''quoted'\\''" in command
    page.get_by_role("button", name="Copy").click()
    assert page.evaluate("() => getSelection().toString()") == command


def test_a_schema_is_sent_and_invalid_json_is_reported(page: Page, scripted: ScriptedGateway, script: Script) -> None:
    page.goto(scripted.url)
    page.get_by_text("JSON schema").click()
    page.locator("#play-schema").fill("{")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#play-problem")).to_contain_text("The JSON schema is no JSON")
    assert script.bodies == []
    page.locator("#play-schema").fill('{"type": "object"}')
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#play-state")).to_have_text("finished")
    [body] = script.bodies
    assert body["response_format"]["json_schema"] == {"name": "answer", "schema": {"type": "object"}}


def test_stop_cancels_the_request_and_another_one_may_follow(
    page: Page, scripted: ScriptedGateway, script: Script, redis_server: EmbeddedServer
) -> None:
    script.allowed = 1
    page.goto(scripted.url)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(ANSWER)).to_have_text("The ")
    with Client(redis_server.url, model=MODEL) as client, page.expect_response("**/cancel") as answer:
        client.submit("x", request_id=ID)
        page.get_by_role("button", name="Stop").click()
        assert answer.value.json()["cancelled"] is True
    expect(page.locator("#play-state")).to_have_text("stopped")
    script.allowed = 4
    page.locator("#play-user").fill("again")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#play-state")).to_have_text("finished")
    expect(page.locator(ANSWER).last).to_have_text("The sky is blue.")


def test_an_error_in_the_stream_is_shown(page: Page, scripted: ScriptedGateway, script: Script) -> None:
    script.error = "the worker was lost <b>twice</b>"
    page.goto(scripted.url)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#play-problem")).to_have_text("the worker was lost <b>twice</b>")
    expect(page.locator("#play-state")).to_have_text("failed")
    expect(page.locator(ANSWER)).to_have_text("The sky is blue.")


def test_hostile_output_and_model_names_are_shown_as_text(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    script.tokens = [HOSTILE[:9], HOSTILE[9:]]
    script.models = [HOSTILE]
    page.goto(scripted.url)
    expect(page.locator("#play-model option")).to_have_text(HOSTILE)
    page.get_by_text("Server-sent events").click()
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#play-state")).to_have_text("finished")
    assert page.locator(ANSWER).text_content() == HOSTILE
    expect(page.locator("#play-raw")).to_contain_text("[DONE]")
    assert page.locator("main img, main script").count() == 0
    assert page.title() == "Headrace"


def test_a_key_is_requested_kept_for_the_tab_and_never_in_a_url(
    watched: Watched, make_gateway: MakeGateway, script: Script
) -> None:
    gateway = make_gateway(keys={"sk-secret": ApiKey("team")})
    page = watched.page
    page.goto(gateway.url)
    expect(page.locator("#key-note")).to_have_text("The gateway asks for an API key.")
    page.get_by_label("API key").fill("sk-wrong")
    page.get_by_label("API key").press("Enter")
    expect(page.locator("#key-note")).to_have_text("The gateway refuses this key.")
    page.get_by_label("API key").fill("sk-secret")
    page.get_by_role("button", name="Use").click()
    expect(page.locator("#play-model")).to_have_value(MODEL)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#play-state")).to_have_text("finished")
    page.get_by_text("As curl").click()
    expect(page.locator("#play-curl")).to_contain_text("Bearer $HEADRACE_API_KEY")
    page.get_by_role("tab", name="Queue").click()
    expect(page.locator("#queue-table")).to_contain_text(MODEL)
    page.reload()
    expect(page.locator("#key-note")).to_have_text("The key is kept until this tab closes.")
    assert "sk-" not in page.url
    assert "sk-secret" not in page.content()
    assert [url for url in [*watched.urls, *script.urls] if "sk-" in url] == []
    assert json.loads(page.evaluate("() => JSON.stringify({...localStorage})")) == {}


def test_the_page_can_be_used_by_keyboard_alone(page: Page, scripted: ScriptedGateway) -> None:
    page.goto(scripted.url)
    reached: list[str] = []
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.id"))
    settings = ["play-model", "play-system", "play-max", "play-temperature", "", ""]  # and two boxes that open
    expected = ["key", "", "tab-playground", *settings, "play-turns", "play-user", "play-send"]
    assert reached[: len(expected)] == expected
    page.locator("#play-user").focus()
    page.keyboard.press("Control+Enter")
    expect(page.locator("#play-state")).to_have_text("finished")
    page.locator("#tab-playground").focus()
    for key, view in (
        ("ArrowRight", "queue"),
        ("ArrowRight", "playground"),
        ("End", "queue"),
    ):
        page.keyboard.press(key)
        expect(page.locator(f"#tab-{view}")).to_be_focused()
        expect(page.locator(f"#{view}")).to_be_visible()
        assert page.locator("[role=tabpanel]:visible").count() == 1


@pytest.mark.parametrize("view", ["playground", "queue"])
def test_nothing_is_cut_off_in_a_window_of_380_pixels(browser: Browser, scripted: ScriptedGateway, view: str) -> None:
    with browser.new_context(viewport={"width": 380, "height": 800}) as context:
        page = context.new_page()
        page.goto(f"{scripted.url}/#{view}")
        expect(page.locator(f"#{view}")).to_be_visible()
        expect(page.locator("#key-note")).not_to_be_empty()
        if view == "queue":
            expect(page.locator("#queue-table")).to_contain_text(MODEL)
            expect(page.locator("#dead-table")).to_contain_text("There are no dead letters.")
            boxes = page.locator(".scroll").evaluate_all("boxes => boxes.map(box => box.scrollWidth - box.clientWidth)")
            assert max(boxes) == 0
        assert page.evaluate("() => document.documentElement.scrollWidth") == 380


def test_every_file_of_the_page_comes_with_the_policy(page: Page, scripted: ScriptedGateway) -> None:
    headers = []
    page.on("response", lambda answer: headers.append((answer.url, answer.all_headers())))
    page.goto(scripted.url)
    expect(page.locator("#key-note")).not_to_be_empty()
    of_page = [found for url, found in headers if url == f"{scripted.url}/" or "/page/" in url]
    assert len(of_page) >= 7
    for found in of_page:
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in found["content-security-policy"]
        assert found["x-content-type-options"] == "nosniff"
        assert found["referrer-policy"] == "no-referrer"
