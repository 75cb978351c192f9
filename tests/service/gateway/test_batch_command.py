"""`headrace batch run` and a gateway with a real worker: the answers, and the faults that the command survives."""

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.gateway.batch_process import BatchProcess, read_lines, write_input
from service.gateway.conftest import RunningGateway
from service.gateway.held_line import HELD_MODEL, answer_held_line, forget_held_model, register_held_model

pytestmark = pytest.mark.rotated(
    "gateway/headrace_gateway/batch", "cli/headrace_cli/batch", "cli/headrace_cli/commands"
)

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAMPLED: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 1, "seed": 7}
CHAT: dict[str, Any] = {**SAMPLED, "messages": [{"role": "user", "content": "hello"}]}
TOO_LONG: dict[str, Any] = {**CHAT, "messages": [{"role": "user", "content": "x " * 3000}]}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCORED = {"n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["e"], "return_token_ids": True}
ANY_BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHATS, CHAT),
    (CHATS, {**CHAT, **SCORED, "metadata": {"a": "b"}}),
    (CHATS, {**CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
    (CHATS, {**CHAT, "response_format": {"type": "json_object"}, "service_tier": "flex"}),
    (COMPLETIONS, {**SAMPLED, "prompt": ["one", "two"], "n": 2, "logprobs": 1}),
    (COMPLETIONS, {**SAMPLED, "prompt": "one", "echo": True, "logprobs": 1, "prompt_logprobs": 1}),
    (CHATS, TOO_LONG),
    (COMPLETIONS, {**SAMPLED, "prompt": "x " * 3000}),
]
"""The worker refuses the last two."""


def bodies(count: int) -> list[dict[str, Any]]:
    return [{**CHAT, "seed": seed, "ignore_eos": True, "max_tokens": 40} for seed in range(count)]


@pytest.fixture
def held_line(gateway: RunningGateway) -> Iterator[dict[str, Any]]:
    """Has no answer before the test gives it one, so that no run ends before."""
    register_held_model(gateway.service.client)
    yield {**CHAT, "model": HELD_MODEL}
    forget_held_model(gateway.service.client)


def asked(gateway: RunningGateway, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return what the gateway answers."""
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(gateway.url + url, json.dumps(body).encode(), head)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    """Return what does not depend on the time and the sender of the request."""
    body = json.loads(json.dumps(body))
    for choice in body.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls", ()):
            call.pop("id")
    if "usage" in body:
        body["usage"].pop("prompt_tokens_details", None)  # what the prefix cache had
    return {name: value for name, value in body.items() if name not in ("id", "created")}


def assert_each_once(folder: Path, count: int, *, failed: int = 0) -> None:
    answers, errors = read_lines(folder / "out.jsonl"), read_lines(folder / "out.errors.jsonl")
    assert (len(answers), len(errors)) == (count - failed, failed)
    ids = {line["custom_id"] for line in answers + errors}
    assert ids == {f"line-{number}" for number in range(count)}
    assert not (folder / "out.jsonl.run").exists()


def test_answers_are_those_of_the_gateway(gateway: RunningGateway, tmp_path: Path) -> None:
    given = tmp_path / "in.jsonl"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(ANY_BODIES)
    ]
    given.write_text("\n".join(map(json.dumps, lines)))  # the last line has no line feed
    run = BatchProcess(tmp_path, "in.jsonl", "out.jsonl", "--json", redis_url=gateway.service.url)
    output, _ = run.end(3)
    summary = json.loads(output)
    assert (summary["status"], summary["exit_code"]) == ("completed_with_errors", 3)
    assert (summary["total"], summary["completed"], summary["failed"]) == (8, 6, 2)
    answers = {line["custom_id"]: line for line in read_lines(tmp_path / "out.jsonl")}
    errors = {line["custom_id"]: line for line in read_lines(tmp_path / "out.errors.jsonl")}
    assert set(errors) == {"6", "7"}
    for number, (url, body) in enumerate(ANY_BODIES):
        line = (answers | errors)[str(number)]
        assert line["error"] is None
        status, expected = asked(gateway, url, body)
        assert line["response"]["status_code"] == status
        assert without_ids(line["response"]["body"]) == without_ids(expected)
        if status == 200:
            assert line["response"]["body"]["id"] == line["response"]["request_id"]
            assert list(line["response"]["body"]) == list(expected)


def test_a_killed_run_is_resumed_without_running_a_request_twice(gateway: RunningGateway, tmp_path: Path) -> None:
    service, out = gateway.service, tmp_path / "out.jsonl"
    write_input(tmp_path / "in.jsonl", bodies(60))
    command = ("in.jsonl", "out.jsonl", "--window", "12")
    before = set(service.client.keys("headrace:stream:*"))
    run = BatchProcess(tmp_path, *command, redis_url=service.url)
    run.wait_until(lambda: out.exists() and len(out.read_bytes().splitlines()) >= 5)
    run.kill()
    with out.open("ab") as file:
        file.write(b'{"id":"batch_req_')  # as if it had been killed in the middle of a write
    BatchProcess(tmp_path, *command, redis_url=service.url).end(0)
    assert_each_once(tmp_path, 60)
    streams = set(service.client.keys("headrace:stream:*")) - before
    assert len(streams) == 60
    for key in streams:
        assert len(service.stream(key.decode().removeprefix("headrace:stream:")).attempts) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_says_how_to_resume(
    gateway: RunningGateway, tmp_path: Path, held_line: dict[str, Any], number: signal.Signals, code: int
) -> None:
    out = tmp_path / "out.jsonl"
    write_input(tmp_path / "in.jsonl", [held_line, *bodies(39)])
    command = ("in.jsonl", "out.jsonl", "--window", "4")
    in_background = number == signal.SIGTERM
    run = BatchProcess(tmp_path, *command, redis_url=gateway.service.url, in_background=in_background)
    run.wait_until(lambda: out.exists() and out.stat().st_size > 0)
    _, told = run.end(code, number)
    assert "the same command" in told
    some = read_lines(out)
    assert 0 < len(some) < 40
    run = BatchProcess(tmp_path, *command, "--json", redis_url=gateway.service.url)
    answer_held_line(gateway.service.client)
    output, _ = run.end(0)
    assert json.loads(output)["completed"] == 40
    assert_each_once(tmp_path, 40)
    assert read_lines(out)[: len(some)] == some


def test_a_complete_run_sends_nothing_when_it_is_repeated(gateway: RunningGateway, tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", [*bodies(3), TOO_LONG])
    BatchProcess(tmp_path, "in.jsonl", "out.jsonl", redis_url=gateway.service.url).end(3)
    before = gateway.service.client.keys("headrace:stream:*")
    BatchProcess(tmp_path, "in.jsonl", "out.jsonl", redis_url=gateway.service.url).end(3)
    assert set(gateway.service.client.keys("headrace:stream:*")) <= set(before)
    assert_each_once(tmp_path, 4, failed=1)


def test_a_full_disk_ends_the_run_with_whole_lines_and_it_can_be_resumed(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    write_input(tmp_path / "in.jsonl", bodies(30))
    command = ("in.jsonl", "out.jsonl", "--window", "8")
    _, told = BatchProcess(tmp_path, *command, redis_url=gateway.service.url, max_file_bytes=5000).end(1)
    assert "out.jsonl cannot be written: File too large" in told
    assert 0 < len(read_lines(tmp_path / "out.jsonl")) < 30
    BatchProcess(tmp_path, *command, redis_url=gateway.service.url).end(0)
    assert_each_once(tmp_path, 30)


def test_standard_input_and_output_are_files_too(gateway: RunningGateway, tmp_path: Path) -> None:
    given = write_input(tmp_path / "in.jsonl", bodies(3)).read_bytes()
    command = ("-", "-", "--errors", "errors.jsonl")
    run = BatchProcess(tmp_path, *command, redis_url=gateway.service.url, stdin=subprocess.PIPE)
    output, _ = run.end(0, given=given)
    assert {json.loads(line)["custom_id"] for line in output.splitlines()} == {"line-0", "line-1", "line-2"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_wrong_lines_are_refused_with_their_numbers_before_anything_is_sent(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    lines = write_input(tmp_path / "in.jsonl", [CHAT, {**CHAT, "temperature": -1}, {**CHAT, "model": "other"}])
    lines.write_bytes(lines.read_bytes() + lines.read_bytes().splitlines()[0] + b"\n{\n")
    before = set(gateway.service.client.keys("headrace:stream:*"))
    run = BatchProcess(tmp_path, "in.jsonl", "out.jsonl", "--json", redis_url=gateway.service.url)
    output, _ = run.end(2)
    summary = json.loads(output)
    assert summary["status"] == "refused"
    assert [(each["line"], each["code"]) for each in summary["problems"]] == [
        (2, "invalid_request"),
        (3, "model_not_found"),
        (4, "duplicate_custom_id"),
        (5, "invalid_json_line"),
    ]
    _, told = BatchProcess(tmp_path, "in.jsonl", "out.jsonl", redis_url=gateway.service.url).end(2)
    assert "line 4: custom_id 'line-0' is already used in line 1" in told
    assert set(gateway.service.client.keys("headrace:stream:*")) <= before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_two_runs_do_not_write_one_output(gateway: RunningGateway, tmp_path: Path, held_line: dict[str, Any]) -> None:
    write_input(tmp_path / "in.jsonl", [held_line])
    command = ("in.jsonl", "out.jsonl")
    first = BatchProcess(tmp_path, *command, redis_url=gateway.service.url)
    first.wait_until((tmp_path / "out.jsonl.run").exists)
    _, told = BatchProcess(tmp_path, *command, redis_url=gateway.service.url).end(1)
    assert "another run writes out.jsonl" in told
    first.kill()


def test_no_fault_loses_or_repeats_an_answer(
    gateway: RunningGateway, tmp_path: Path, held_line: dict[str, Any]
) -> None:
    service, out = gateway.service, tmp_path / "out.jsonl"
    write_input(tmp_path / "in.jsonl", [held_line, *bodies(149), TOO_LONG])
    command = ("in.jsonl", "out.jsonl", "--window", "24")

    def has(count: int) -> bool:
        return out.exists() and len(out.read_bytes().splitlines()) >= count

    run = BatchProcess(tmp_path, *command, redis_url=service.url)
    run.wait_until(lambda: has(10))
    service.workers[-1].kill()
    service.start_worker().wait_ready()
    run.wait_until(lambda: has(40))
    service.server.kill()
    service.server.start()
    run.wait_until(lambda: has(70))
    run.kill()
    run = BatchProcess(tmp_path, *command, redis_url=service.url, max_file_bytes=out.stat().st_size + 1)
    answer_held_line(service.client)
    run.end(1)
    BatchProcess(tmp_path, *command, redis_url=service.url).end(3)
    assert_each_once(tmp_path, 151, failed=1)
    tokens = {line["custom_id"]: line["response"]["body"]["usage"]["completion_tokens"] for line in read_lines(out)}
    assert tokens.pop("line-0") == 4
    assert set(tokens.values()) == {40}
