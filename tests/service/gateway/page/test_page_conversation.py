"""The conversation of the playground in a real browser."""

import json
from datetime import datetime
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from headrace_broker import Client
from headrace_broker.server.embedded import EmbeddedServer
from service.gateway.page.conftest import ANSWER, PATIENCE
from service.gateway.page.scripted import ID, MODEL, Script, ScriptedGateway

expect.set_options(timeout=PATIENCE)


def say(page: Page, text: str) -> None:
    page.locator("#play-user").fill(text)
    page.locator("#play-user").press("Enter")


def finished(page: Page, answer: str) -> None:
    expect(page.locator("#play-state")).to_have_text("finished")
    expect(page.locator(ANSWER).last).to_have_text(answer)


def messages(script: Script) -> list[list[tuple[str, str]]]:
    """Return role and content of the messages of each request."""
    return [[(message["role"], message["content"]) for message in body["messages"]] for body in script.bodies]


def call_part(arguments: str, **more: Any) -> dict[str, Any]:
    """Return a delta with a part of a tool call; the first part has the call's id."""
    first = {"type": "function", **more} if more else {}
    function = {"arguments": arguments, **({"name": "weather"} if more else {})}
    return {"tool_calls": [{"index": 0, "function": function, **first}]}


def test_each_request_has_the_turns_before_it(page: Page, scripted: ScriptedGateway, script: Script) -> None:
    page.goto(scripted.url)
    page.locator("#play-system").fill("be brief")
    for said, tokens in (("one", ["1"]), ("two", ["2", "!"]), ("three", ["3"])):
        script.tokens = tokens
        say(page, said)
        finished(page, "".join(tokens))
    expect(page.locator("#play-user")).to_be_empty()
    expect(page.locator(".said")).to_have_text(["one", "two", "three"])
    expect(page.locator(ANSWER)).to_have_text(["1", "2!", "3"])
    expect(page.locator(".answer .who").first).to_have_text(MODEL)
    system, first, second = ("system", "be brief"), ("user", "one"), ("user", "two")
    assert messages(script) == [
        [system, first],
        [system, first, ("assistant", "1"), second],
        [system, first, ("assistant", "1"), second, ("assistant", "2!"), ("user", "three")],
    ]


def test_the_last_answer_is_regenerated_with_the_same_request(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    page.goto(scripted.url)
    expect(page.get_by_role("button", name="Regenerate")).to_be_disabled()
    say(page, "one")
    finished(page, "The sky is blue.")
    say(page, "two")
    finished(page, "The sky is blue.")
    script.tokens = ["better"]
    page.get_by_role("button", name="Regenerate").click()
    finished(page, "better")
    expect(page.locator(ANSWER)).to_have_text(["The sky is blue.", "better"])
    expect(page.locator(".said")).to_have_text(["one", "two"])
    assert script.bodies[2] == script.bodies[1]
    say(page, "three")
    finished(page, "better")
    answered = [("user", "one"), ("assistant", "The sky is blue."), ("user", "two"), ("assistant", "better")]
    assert messages(script)[-1] == [*answered, ("user", "three")]


def test_an_answer_stays_if_nothing_of_another_one_arrives(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    page.goto(scripted.url)
    say(page, "one")
    finished(page, "The sky is blue.")
    page.locator("#play-system").fill("be brief")
    script.is_held = True
    with page.expect_request("**/v1/chat/completions"):
        page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("#play-state")).to_have_text("waiting")
    expect(page.locator(ANSWER)).to_have_text(["The sky is blue."])
    with page.expect_response("**/cancel"):
        page.get_by_role("button", name="Stop").click()
        script.is_held = False
    expect(page.locator("#play-state")).to_have_text("stopped")
    expect(page.locator(ANSWER)).to_have_text(["The sky is blue."])
    say(page, "two")
    expect(page.locator(ANSWER)).to_have_text(["The sky is blue.", "The sky is blue."])
    finished(page, "The sky is blue.")
    system, first = ("system", "be brief"), ("user", "one")
    assert messages(script)[1:] == [
        [system, first],
        [system, first, ("assistant", "The sky is blue."), ("user", "two")],
    ]


def test_a_new_conversation_begins_without_the_turns_before_and_ends_a_running_answer(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    page.goto(scripted.url)
    script.allowed = 1
    say(page, "one")
    expect(page.locator(ANSWER)).to_have_text("The ")
    with page.expect_response("**/cancel"):
        page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#play-turns li")).to_have_count(0)
    expect(page.locator("#play-state")).to_have_text("idle")
    expect(page.locator("#play-tokens")).to_have_text("\N{EN DASH}")
    expect(page.locator("#play-user")).to_be_focused()
    script.allowed = 4
    say(page, "two")
    finished(page, "The sky is blue.")
    assert messages(script)[-1] == [("user", "two")]


def test_stop_cancels_a_request_whose_response_has_not_begun(
    page: Page, scripted: ScriptedGateway, script: Script, redis_server: EmbeddedServer
) -> None:
    script.is_held = True
    page.goto(scripted.url)
    with page.expect_request("**/v1/chat/completions"):
        say(page, "one")
    page.keyboard.press("Escape")
    expect(page.locator("#play-state")).to_have_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    with Client(redis_server.url, model=MODEL) as client, page.expect_response("**/cancel") as answer:
        client.submit("x", request_id=ID)
        script.is_held = False
        assert answer.value.json()["cancelled"] is True
    script.tokens = ["2"]
    say(page, "two")
    finished(page, "2")
    # a turn without an answer is not repeated
    assert messages(script) == [[("user", "one")], [("user", "two")]]


@pytest.mark.parametrize("has_begun", [True, False])
def test_stop_closes_the_connection_if_the_response_has_no_id(
    page: Page, scripted: ScriptedGateway, script: Script, has_begun: bool
) -> None:
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    script.has_id, script.is_held, script.allowed = False, not has_begun, 1
    page.goto(scripted.url)
    with page.expect_request("**/v1/chat/completions"):
        say(page, "one")
    if has_begun:
        expect(page.locator(ANSWER)).to_have_text("The ")
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/v1/chat/completions")):
        page.keyboard.press("Escape")
        script.is_held = False
    expect(page.locator("#play-state")).to_have_text("stopped")
    page.evaluate("() => fetch('/v1/models')")  # by its end, all that was sent before it is known
    assert not any(url.endswith("/cancel") for url in sent)


def test_a_stopped_answer_stays_in_the_conversation_as_far_as_it_came(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    script.allowed = 2
    page.goto(scripted.url)
    say(page, "one")
    expect(page.locator(ANSWER)).to_have_text("The sky ")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#play-state")).to_have_text("stopped")
    script.allowed = 4
    say(page, "two")
    finished(page, "The sky is blue.")
    expect(page.locator(ANSWER)).to_have_text(["The sky ", "The sky is blue."])
    assert messages(script)[-1] == [("user", "one"), ("assistant", "The sky "), ("user", "two")]


def test_escape_stops_an_answer_wherever_the_focus_is(page: Page, scripted: ScriptedGateway, script: Script) -> None:
    script.allowed = 1
    page.goto(scripted.url)
    page.get_by_role("button", name="Send").click()  # it is disabled from here on, and loses the focus
    expect(page.locator(ANSWER)).to_have_text("The ")
    # the Escape with which a user rejects a word of an input method
    page.locator("#play-user").evaluate(
        "node => node.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', isComposing: true, bubbles: true}))"
    )
    script.allowed = 2
    expect(page.locator(ANSWER)).to_have_text("The sky ")
    page.locator("#key").focus()
    page.keyboard.press("Escape")
    expect(page.locator("#play-state")).to_have_text("stopped")


def test_enter_sends_and_shift_enter_begins_a_new_line(page: Page, scripted: ScriptedGateway, script: Script) -> None:
    page.goto(scripted.url)
    box = page.locator("#play-user")
    box.fill("   ")
    box.press("Enter")
    box.fill("one")
    box.press("Shift+Enter")
    page.keyboard.type("two")
    # the Enter with which an input method ends a word
    box.evaluate(
        "node => node.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true}))"
    )
    expect(box).to_have_value("one\ntwo")
    assert script.bodies == []
    box.press("Enter")
    finished(page, "The sky is blue.")
    expect(box).to_be_focused()
    page.locator("#play-system").press("Control+Enter")  # without a message
    box.fill("again")
    page.locator("#play-system").fill("brief")
    page.locator("#play-system").press("Control+Enter")
    expect(page.locator(ANSWER)).to_have_count(2)
    finished(page, "The sky is blue.")
    assert [each[-1] for each in messages(script)] == [("user", "one\ntwo"), ("user", "again")]


def test_reasoning_is_folded_and_not_repeated(page: Page, scripted: ScriptedGateway, script: Script) -> None:
    script.tokens = [{"reasoning_content": "let me "}, {"reasoning_content": "see <b>"}, "yes"]
    page.goto(scripted.url)
    say(page, "one")
    finished(page, "yes")
    thoughts = page.locator(".reasoning pre")
    expect(thoughts).to_be_hidden()
    page.get_by_text("Reasoning").click()
    expect(thoughts).to_have_text("let me see <b>")
    script.tokens = ["no"]
    say(page, "two")
    finished(page, "no")
    expect(page.locator(".reasoning").last).to_be_hidden()
    assert messages(script)[-1][1] == ("assistant", "yes")


def test_reasoning_and_calls_are_not_written_again_while_text_arrives(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    script.tokens, script.allowed = [{"reasoning_content": "let me see"}, call_part("{}", id="call_1"), "a", "b"], 3
    page.goto(scripted.url)
    say(page, "one")
    expect(page.locator(ANSWER)).to_have_text("a")
    nodes = page.evaluate_handle(
        "() => [document.querySelector('.reasoning pre').firstChild, document.querySelector('.call')]"
    )
    script.allowed = 4
    finished(page, "ab")
    assert nodes.evaluate("nodes => nodes.map(node => node.isConnected)") == [True, True]


def test_the_next_draw_of_an_answer_waits_longer_than_the_last_one_took(page: Page, scripted: ScriptedGateway) -> None:
    page.goto(scripted.url)
    took, waited = page.evaluate(
        """async () => {
          const { Answer } = await import("/page/answer.js");
          const answer = new Answer("m");
          const draw = (text) => new Promise((resolve) => {
            answer.add({ content: text }, (change) => {
              const began = performance.now();
              change();
              while (performance.now() - began < 20);
              resolve([began, performance.now()]);
            });
          });
          const [began, ended] = await draw("a");
          const [next] = await draw("b");
          return [ended - began, next - ended];
        }"""
    )
    assert waited > 3 * took


def test_a_tool_call_is_shown_and_the_next_message_is_its_result(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    script.tokens = [call_part("", id="call_1"), call_part('{"city": '), call_part('"<i>Ulm</i>"}')]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    page.goto(scripted.url)
    page.get_by_text("Tools", exact=True).click()
    page.locator("#play-tools").fill(json.dumps(tools))
    say(page, "how is it in Ulm?")
    expect(page.locator("#play-state")).to_have_text("finished")
    expect(page.locator(".call p code")).to_have_text("weather")
    expect(page.locator(".call pre code")).to_have_text('{"city": "<i>Ulm</i>"}')
    script.tokens = ["sunny"]
    say(page, "24 degrees")
    finished(page, "sunny")
    first, second = script.bodies
    assert first["tools"] == second["tools"] == tools
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "<i>Ulm</i>"}'}}
    assert second["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "24 degrees"},
    ]


def test_a_tool_call_of_a_stopped_answer_is_not_repeated(page: Page, scripted: ScriptedGateway, script: Script) -> None:
    script.tokens, script.allowed = ["let me see", call_part("", id="call_1"), call_part('{"ci'), "never"], 3
    page.goto(scripted.url)
    say(page, "one")
    expect(page.locator(".call pre code")).to_have_text('{"ci')
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#play-state")).to_have_text("stopped")
    script.tokens = ["2"]
    say(page, "two")
    finished(page, "2")
    assert messages(script)[-1] == [("user", "one"), ("assistant", "let me see"), ("user", "two")]
    assert "tool_calls" not in script.bodies[-1]["messages"][1]


def test_a_failed_answer_can_be_asked_for_again_and_is_no_turn_of_the_next_request(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    script.tokens, script.error = ["half"], "the worker was lost"
    page.goto(scripted.url)
    say(page, "one")
    expect(page.locator("#play-problem")).to_have_text("the worker was lost")
    expect(page.locator(ANSWER)).to_have_text("half")
    script.tokens = []
    say(page, "two")
    expect(page.locator(".said")).to_have_text(["one", "two"])
    expect(page.locator("#play-state")).to_have_text("failed")
    script.tokens, script.error = ["fine"], None
    page.get_by_role("button", name="Regenerate").click()
    finished(page, "fine")
    expect(page.locator("#play-problem")).to_be_hidden()
    assert messages(script)[1:] == [[("user", "two")]] * 2


def test_the_page_says_how_far_a_model_is_loaded_until_it_is(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    page.clock.install()
    script.fields = {"state": "loading", "progress": 0.408}
    page.goto(scripted.url)
    expect(page.locator("#play-loading-text")).to_have_text(f"{MODEL} is loading, 40 %. It answers when it is loaded.")
    expect(page.locator("#play-model option")).to_have_text(f"{MODEL} (loading, 40 %)")
    script.fields = {"max_model_len": 9, "state": "loading", "progress": 0.75}
    page.clock.run_for(2100)
    expect(page.locator("#play-loading-text")).to_have_text(f"{MODEL} is loading, 75 %. Requests wait in the queue.")
    assert page.locator("#play-loading-bar").evaluate("bar => bar.value") == 0.75
    script.fields = {"max_model_len": 9}
    page.clock.run_for(2100)
    expect(page.locator("#play-loading")).to_be_hidden()
    expect(page.locator("#play-model option")).to_have_text(MODEL)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    page.clock.run_for(10_000)
    page.evaluate("() => fetch('/v1/models?last')")  # by its end, all that was sent before it is known
    assert sent == [f"{scripted.url}/v1/models?last"]


def test_the_chosen_model_stays_chosen_if_one_list_lacks_it(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    page.clock.install(time=datetime(2026, 1, 1))
    page.clock.pause_at(datetime(2026, 1, 2))  # from here on, the page polls only when the test lets time pass
    script.models, script.fields = ("a", "b"), {"state": "loading", "progress": 0.9}
    page.goto(scripted.url)
    expect(page.locator("#play-model option")).to_have_count(2)
    page.locator("#play-model").select_option("b")
    script.models, script.fields = ("a",), {"max_model_len": 9}
    page.clock.run_for(2100)
    expect(page.locator("#play-model option")).to_have_text(["a"])
    script.models = ("a", "b")
    page.clock.run_for(2100)
    expect(page.locator("#play-model option")).to_have_text(["a", "b"])
    expect(page.locator("#play-model")).to_have_value("b")


def test_the_page_notices_that_a_model_is_loading_while_an_answer_is_awaited(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    page.clock.install()
    script.allowed = 0
    page.goto(scripted.url)
    expect(page.locator("#play-model")).to_have_value(MODEL)
    say(page, "one")
    expect(page.locator("#play-state")).to_have_text("waiting")
    script.fields = {"max_model_len": 9, "state": "loading", "progress": 0.1}
    page.clock.run_for(2100)
    expect(page.locator("#play-loading-text")).to_contain_text("10 %")
    script.fields, script.allowed = {"max_model_len": 9}, 4
    page.clock.run_for(2100)
    finished(page, "The sky is blue.")
    expect(page.locator("#play-loading")).to_be_hidden()
