"""The queue view in a real browser, on a real server with real messages."""

from collections.abc import Iterator

import pytest
import redis
from playwright.sync_api import Page, Route, expect

from headrace_broker import Client
from headrace_broker.keys import queue_lists, queue_name
from headrace_broker.queue.leases import Leases
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_gateway.keys.api_key import ApiKey
from headrace_wire.codes import DeadLetterReason
from service.gateway.page.conftest import PATIENCE, MakeGateway, Watched
from service.gateway.page.scripted import MODEL, Script, ScriptedGateway

expect.set_options(timeout=PATIENCE)

KEYS = {"sk-admin": ApiKey("root", is_admin=True), "sk-team": ApiKey("team", tenant="acme")}


@pytest.fixture
def client(redis_server: EmbeddedServer) -> Iterator[Client]:
    with Client(redis_server.url, model=MODEL) as client:
        yield client


@pytest.fixture
def leases(redis_client: "redis.Redis") -> Leases:
    return Leases(redis_client, lease_seconds=600, delivery_limit=5)


def dead_letter(client: Client, leases: Leases, *request_ids: str, detail: str = "killed") -> None:
    for request_id in request_ids:
        client.submit("the wheel Zanzibar", request_id=request_id)
        [message] = leases.fetch(queue_lists(queue_name(MODEL)), 1)
        leases.dead_letter(message.lease_id, DeadLetterReason.POISON, detail)


def open_queue(page: Page, scripted: ScriptedGateway, key: str = "") -> None:
    page.goto(f"{scripted.url}/#queue")
    if key:
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Use").click()


def test_depths_follow_the_queue_while_it_is_seen(
    page: Page, scripted: ScriptedGateway, client: Client, leases: Leases
) -> None:
    open_queue(page, scripted)
    row = page.locator("#queue-table tbody tr")
    expect(row.locator("td").nth(1)).to_have_text("0")
    expect(row.locator("td").last).to_contain_text("worker@host")
    client.submit("x", tenant="acme")
    client.submit("x", tenant="<b>globex</b>", priority=3)
    expect(row.locator("td").nth(1)).to_contain_text("2")
    leases.fetch(queue_lists(queue_name(MODEL)), 1)
    expect(row.locator("td").nth(2)).to_have_text("1")
    expect(page.locator("#tenants-table tbody tr")).to_have_text([f"{MODEL}<b>globex</b>1"])


def test_the_queue_is_read_only_while_it_is_seen(page: Page, scripted: ScriptedGateway, script: Script) -> None:
    def polls() -> int:
        return sum("/headrace/overview" in url for url in script.urls)

    page.clock.install()
    page.goto(scripted.url)
    expect(page.locator("#play-model")).not_to_have_value("")
    page.clock.run_for(5000)
    assert polls() == 0
    page.get_by_role("tab", name="Queue").click()
    page.clock.run_for(10)
    expect(page.locator("#queue-table")).to_contain_text(MODEL)
    assert polls() == 1
    with page.expect_response("**/headrace/overview"):
        page.clock.run_for(1100)
    page.get_by_role("tab", name="Playground").click()
    seen = polls()
    page.clock.run_for(10_000)
    assert polls() == seen


def test_an_outage_is_shown_until_it_ends(page: Page, scripted: ScriptedGateway) -> None:
    page.route("**/headrace/overview", lambda route: route.abort())
    open_queue(page, scripted)
    expect(page.locator("#queue-problem")).to_have_text("The gateway does not answer.")
    page.unroute("**/headrace/overview")
    expect(page.locator("#queue-table")).to_contain_text(MODEL)
    expect(page.locator("#queue-problem")).to_be_hidden()


def test_the_page_polls_again_only_after_a_slow_response(page: Page, scripted: ScriptedGateway) -> None:
    held: list[Route] = []
    page.clock.install()
    page.route("**/headrace/overview", lambda route: held.append(route))
    with page.expect_request("**/headrace/overview"):
        open_queue(page, scripted)
        page.clock.run_for(10)
    page.get_by_role("tab", name="Playground").click()
    page.get_by_role("tab", name="Queue").click()
    page.clock.run_for(20_000)
    assert len(held) == 1
    with page.expect_request("**/headrace/overview"):
        held[0].abort()
        expect(page.locator("#queue-problem")).to_be_visible()
        page.clock.run_for(1100)


def test_an_administrator_requeues_and_purges_dead_letters_after_confirming(
    page: Page, make_gateway: MakeGateway, client: Client, leases: Leases
) -> None:
    dead_letter(client, leases, "a", "b", "c", "d", detail="<img src=x onerror=alert(1)>")
    gateway = make_gateway(keys=KEYS)
    open_queue(page, gateway, "sk-admin")
    rows = page.locator("#dead-table tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.first).to_contain_text("<img src=x onerror=alert(1)>")
    page.get_by_role("button", name="Requeue a", exact=True).click()
    expect(page.locator("#dead-result")).to_have_text("1 requeued.")
    expect(rows).to_have_count(3)
    page.get_by_role("button", name="Purge b", exact=True).click()
    expect(page.get_by_role("button", name="Keep")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#confirm")).to_be_hidden()
    assert len(client.dead_letters()) == 3
    page.get_by_role("button", name="Purge b", exact=True).click()
    page.locator("#confirm-yes").click()
    expect(page.locator("#dead-result")).to_have_text("1 deleted.")
    page.get_by_role("button", name="Purge all shown").click()
    expect(page.locator("#confirm-text")).to_have_text("Delete 2 dead letters for good?")
    page.locator("#confirm-yes").click()
    expect(page.locator("#dead-table")).to_contain_text("There are no dead letters.")
    assert client.dead_letters() == []
    assert leases.fetch(queue_lists(queue_name(MODEL)), 10)[0].bound_id == "a"


def test_the_result_of_a_purge_is_shown_with_the_list_after_it_and_an_older_list_never_replaces_it(
    page: Page, make_gateway: MakeGateway, client: Client, leases: Leases
) -> None:
    dead_letter(client, leases, "a", "b", "c")
    open_queue(page, make_gateway(keys=KEYS), "sk-admin")
    rows = page.locator("#dead-table tbody tr")
    expect(rows).to_have_count(3)
    held: list[Route] = []
    page.route("**/headrace/dead-letters?limit=100", lambda route: held.append(route), times=1)
    with page.expect_request("**/headrace/dead-letters?limit=100"):
        page.locator("#dead-refresh").click()
    older = held[0].fetch()
    page.get_by_role("button", name="Purge b", exact=True).click()
    with page.expect_response("**/headrace/dead-letters/purge"):
        page.locator("#confirm-yes").click()
    expect(page.locator("#dead-result")).to_be_empty()
    held[0].fulfill(response=older)
    expect(page.locator("#dead-result")).to_have_text("1 deleted.")
    expect(rows).to_have_count(2)


def test_other_keys_see_no_tenants_workers_or_dead_letters(
    watched: Watched, make_gateway: MakeGateway, client: Client, leases: Leases, script: Script
) -> None:
    dead_letter(client, leases, "a")
    gateway = make_gateway(keys=KEYS)
    open_queue(watched.page, gateway, "sk-team")
    expect(watched.page.locator("#queue-table")).to_contain_text(MODEL)
    expect(watched.page.locator("#queue-table")).not_to_contain_text("worker@host")
    expect(watched.page.locator("#dead-card")).to_be_hidden()
    expect(watched.page.locator("#tenants-card")).to_be_hidden()
    assert [url for url in script.urls if "dead-letters" in url] == []


def test_a_request_is_looked_up_and_cancelled_by_its_id(page: Page, scripted: ScriptedGateway, client: Client) -> None:
    client.submit("x", request_id="some/../id".replace("/", "."))
    open_queue(page, scripted)
    page.get_by_label("Request id").fill("some....id")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#one-result")).to_have_text("pending")
    page.get_by_role("button", name="Cancel it").first.click()
    page.locator("#confirm-yes").click()
    expect(page.locator("#one-result")).to_have_text("cancelled")
    assert client.status("some....id").finish_reason == "cancelled"
    page.get_by_label("Request id").fill("unknown")
    page.get_by_role("button", name="Look up").click()
    unknown = "404: no request 'unknown': it has expired, or this key does not own it"
    expect(page.locator("#one-result")).to_have_text(unknown)


def test_a_request_that_computes_rows_is_looked_up_with_their_number(
    page: Page, scripted: ScriptedGateway, redis_client: "redis.Redis"
) -> None:
    writer = StreamWriter(redis_client, 600)
    attempt = writer.claim("rows", "w").attempt
    writer.publish([StreamWrite.rows("rows", attempt, 0, 2, bytes(8))])
    open_queue(page, scripted)
    page.get_by_label("Request id").fill("rows")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#one-result")).to_have_text("running, 2 rows")
