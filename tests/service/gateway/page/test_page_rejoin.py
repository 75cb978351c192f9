"""The rejoin view in a real browser."""

import pytest
from playwright.sync_api import Page, expect

from service.gateway.page.conftest import PATIENCE, MakeReplicas, Watched
from service.gateway.page.scripted import ID, Script, ScriptedGateway

expect.set_options(timeout=PATIENCE)

WORDS = [f"word{number} " for number in range(30)]


@pytest.fixture
def script() -> Script:
    return Script(tokens=WORDS, allowed=10)


def start(page: Page, scripted: ScriptedGateway, cut_after: str = "") -> None:
    page.goto(f"{scripted.url}/#rejoin")
    page.get_by_label("Cut after tokens").fill(cut_after)
    expect(page.locator("#join-model")).not_to_have_value("")
    page.get_by_role("button", name="Start a stream").click()


def test_a_cut_stream_is_rejoined_without_a_lost_or_repeated_token(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    start(page, scripted)
    expect(page.locator("#join-cursor")).to_have_text("1-10.0")
    expect(page.locator("#join-id")).to_have_text(ID)
    page.get_by_role("button", name="Cut the connection").click()
    expect(page.locator("#join-state")).to_have_text("cut")
    script.allowed = 30
    page.get_by_role("button", name="Rejoin", exact=True).click()
    expect(page.locator("#join-state")).to_have_text("finished")
    assert page.locator("#join-output").text_content() == "".join(WORDS)
    expect(page.locator("#join-verdict")).to_have_text(
        "30 tokens came over 2 connections; the finished answer has 30. No token was lost or doubled."
    )
    expect(page.locator("#join-connections li")).to_have_text(
        ["1 · this replica · 10 tokens", "2 · this replica · 20 tokens"]
    )
    assert any("starting_after=1-10.0" in url for url in script.urls)


def test_a_stream_is_rejoined_at_another_replica_after_its_own_has_died(
    watched: Watched, replicas: MakeReplicas, script: Script
) -> None:
    page = watched.page
    first, second = replicas(2)
    start(page, first)
    expect(page.locator("#join-cursor")).to_have_text("1-10.0")
    first.__exit__()
    expect(page.locator("#join-state")).to_have_text("failed")
    watched.faults.clear()  # the browser logs the broken connection
    script.allowed = 30
    page.get_by_label("Another replica").fill(f"{second.url}/")
    page.get_by_role("button", name="Rejoin there").click()
    expect(page.locator("#join-verdict")).to_contain_text("No token was lost or doubled.")
    expect(page.locator("#join-connections li").last).to_have_text(f"2 · {second.url} · 20 tokens")
    assert page.locator("#join-output").text_content() == "".join(WORDS)


def test_a_second_reader_gets_the_whole_text_and_does_not_disturb_the_first(
    page: Page, scripted: ScriptedGateway, script: Script
) -> None:
    start(page, scripted)
    expect(page.locator("#join-cursor")).to_have_text("1-10.0")
    page.get_by_role("button", name="Open a second reader").click()
    expect(page.locator("#join-second-state")).to_have_text("10 tokens")
    script.allowed = 30
    expect(page.locator("#join-state")).to_have_text("finished")
    expect(page.locator("#join-second-state")).to_have_text("30 tokens, finished")
    for output in ("#join-output", "#join-second-output"):
        assert page.locator(output).text_content() == "".join(WORDS)


def test_a_repeated_token_is_detected(page: Page, scripted: ScriptedGateway, script: Script) -> None:
    script.repeat_token = 20
    start(page, scripted, cut_after="5")
    expect(page.locator("#join-state")).to_have_text("cut")
    expect(page.locator("#join-cursor")).to_have_text("1-5.0")
    script.allowed = 30
    page.get_by_role("button", name="Rejoin", exact=True).click()
    expect(page.locator("#join-verdict")).to_have_text("The joined text is not the text of the finished answer.")
    expect(page.locator("#join-verdict")).to_have_attribute("data-tone", "bad")


def test_a_replica_that_is_not_allowed_is_reported_and_not_called(
    watched: Watched, replicas: MakeReplicas, script: Script
) -> None:
    first, second = replicas(2, are_allowed=False)
    page = watched.page
    start(page, first)
    expect(page.locator("#join-cursor")).to_have_text("1-10.0")
    page.get_by_role("button", name="Cut the connection").click()
    page.get_by_label("Another replica").fill(second.url)
    page.get_by_role("button", name="Rejoin there").click()
    expect(page.locator("#join-problem")).to_contain_text("do not allow each other")
    assert [url for url in script.urls if url.startswith(second.url)] == []
    assert all("Content Security Policy" in fault for fault in watched.faults)
    watched.faults.clear()
    page.get_by_label("Another replica").fill("javascript:alert(1)")
    page.get_by_role("button", name="Rejoin there").click()
    expect(page.locator("#join-problem")).to_contain_text("needs a URL such as")


def test_hostile_output_is_shown_as_text_at_every_reader(page: Page, scripted: ScriptedGateway, script: Script) -> None:
    script.tokens, script.allowed = ["<img src=x onerror=alert(1)>", "<script>", "alert(1)</script>"], 1
    start(page, scripted)
    expect(page.locator("#join-cursor")).to_have_text("1-1.0")
    page.get_by_role("button", name="Open a second reader").click()
    script.allowed = 3
    expect(page.locator("#join-second-state")).to_have_text("3 tokens, finished")
    for output in ("#join-output", "#join-second-output"):
        assert page.locator(output).text_content() == "".join(script.tokens)
    assert page.locator("main img, main script").count() == 0
