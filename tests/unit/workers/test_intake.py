"""Messages are read and checked, and invalid ones refused."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from headrace_broker.models.identity import ModelIdentity
from headrace_broker.streams.events import ChunkEvent
from headrace_broker.streams.writer import StreamClaim
from headrace_engine.api.input_processor import InputProcessor
from headrace_engine.requests.sampling_params import RequestOutputKind, SamplingParams
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_parts import TokenizerParts
from headrace_workers.preparation.intake import Incoming, Intake, RefusedError, seed_of
from headrace_workers.requests.streams import generate_job_of
from unit.workers.fakes import MODEL, FakeCeleryRequest, FakeTokenizer


@pytest.fixture
def intake() -> Intake:
    return Intake(InputProcessor(MODEL, FakeTokenizer()), ["tiny", "bulk"])  # type: ignore[arg-type]


def incoming(kwargs: Any = None, request_id: str = "r1", **headers: Any) -> Incoming:
    return Incoming.read(FakeCeleryRequest(request_id, kwargs, **headers))


@pytest.mark.parametrize(
    "odd", ["noon", float("nan"), float("inf"), 10**400, -5.0, 0, True, None, [1], {"a": 1}], ids=lambda _: ""
)
def test_an_invalid_enqueue_time_counts_as_absent(odd: Any) -> None:
    assert incoming(enqueued_at=odd).enqueued_at is None
    assert incoming(enqueued_at=odd).waited is None


def test_redis_measures_the_wait_if_the_producer_gives_no_time() -> None:
    assert (incoming().waited, incoming().clock) == (None, None)
    read = incoming(queued_at=time.monotonic() - 40)
    assert (read.waited, read.clock) == (pytest.approx(40, abs=5), "redis")


@pytest.mark.parametrize("ahead", [3600, 40 * 86_400])
def test_a_producers_fast_clock_makes_no_wait_shorter_than_redis_measured(ahead: float) -> None:
    read = incoming(enqueued_at=time.time() + ahead, queued_at=time.monotonic() - 40)
    assert (read.waited, read.clock) == (pytest.approx(40, abs=5), "redis")
    assert incoming(enqueued_at=time.time() + ahead).waited == pytest.approx(0, abs=5)


def test_the_producers_time_counts_the_wait_before_the_first_sort() -> None:
    read = incoming(enqueued_at=time.time() - 60, queued_at=time.monotonic() - 40)
    assert (read.waited, read.clock) == (pytest.approx(60, abs=5), "producer")


def test_a_message_does_not_wait_before_its_eta() -> None:
    due = datetime.now(UTC) - timedelta(seconds=5)
    assert incoming(enqueued_at=time.time() - 600, due=due).waited == pytest.approx(5, abs=4)


@pytest.mark.parametrize(("given", "read"), [(3, 3), (-7, 0), (99, 9), ("high", 0), (None, 0)])
def test_a_priority_is_clamped_to_0_to_9(given: Any, read: int) -> None:
    assert incoming(priority=given).priority == read


def test_the_deadline_is_the_earliest_of_expiry_and_time_limits() -> None:
    in_ten = datetime.now(UTC) + timedelta(seconds=10)
    assert incoming().deadline is None
    assert incoming(expires=in_ten).deadline == in_ten.timestamp()
    assert incoming(expires=in_ten, time_limits=(20, None)).deadline == in_ten.timestamp()
    before = time.time()
    deadline = incoming(expires=in_ten, time_limits=(20, 5)).deadline
    assert deadline is not None
    assert before + 5 <= deadline <= time.time() + 5


@pytest.mark.parametrize("odd", [0, -1, "5", float("nan"), float("inf"), True, [5]], ids=lambda _: "")
def test_an_invalid_time_limit_is_no_deadline(odd: Any) -> None:
    assert incoming(time_limits=(odd, None)).deadline is None


def test_a_request_without_a_seed_gets_one_from_its_id(intake: Intake) -> None:
    body = [[], {"prompt": "abc"}, {}]
    first, second, other = (intake.process(name, body) for name in ("r1", "r1", "r2"))
    assert first.params["seed"] == second.params["seed"] == seed_of("r1")
    assert other.params["seed"] != first.params["seed"]
    given = intake.process("r1", [[], {"prompt": "abc", "sampling_params": {"seed": 7}}, {}])
    assert given.params["seed"] == 7


def test_parameters_that_a_message_omits_come_from_the_generation_config() -> None:
    model = replace(MODEL, default_sampling_params={"temperature": 0.25, "top_k": 7, "max_tokens": 9})
    intake = Intake(InputProcessor(model, FakeTokenizer()), ["tiny"])  # type: ignore[arg-type]
    params = intake.process("r1", [[], {"prompt": "a", "sampling_params": {"top_k": 3}}, {}]).params
    assert (params["temperature"], params["top_k"], params["max_tokens"]) == (0.25, 3, 9)
    params = intake.process("r1", [[], {"prompt": "a"}, {}]).params
    assert (params["temperature"], params["top_k"], params["max_tokens"]) == (0.25, 7, 9)


def test_a_request_is_tokenised_and_streams_deltas(intake: Intake) -> None:
    prepared = intake.process("r1", [[], {"prompt": "abc", "model": "tiny", "lora": "sql"}, {}])
    assert prepared.token_ids == [10, 11, 12]
    assert SamplingParams.from_dict(prepared.params).output_kind is RequestOutputKind.DELTA
    assert prepared.lora == "sql"


def test_repeated_allowed_tokens_are_deduplicated(intake: Intake) -> None:
    params = {"allowed_token_ids": [5, 7, 5] * 1000}
    prepared = intake.process("r1", [[], {"prompt": "abc", "sampling_params": params}, {}])
    assert prepared.params["allowed_token_ids"] == [5, 7]


@pytest.mark.parametrize(
    ("kwargs", "code"),
    [
        ({"prompt": "abc", "model": "other"}, "model_not_found"),
        ({"prompt": "a" * 100}, "context_length_exceeded"),
        ({"prompt_token_ids": [5] * 64}, "context_length_exceeded"),
        ({"prompt_token_ids": [100]}, "invalid_request"),
        ({}, "invalid_request"),
    ],
)
def test_wrong_requests_are_refused_with_their_code(intake: Intake, kwargs: Any, code: str) -> None:
    with pytest.raises(RefusedError) as refused:
        intake.process("r1", [[], kwargs, {}])
    assert refused.value.error.code == code


def test_the_options_of_a_chat_reach_the_models_template(intake: Intake) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments.x }}{% endfor %}"
        "{% endfor %}"
        "{{ tools[0].name }}{{ letters }}{% if add_generation_prompt %}z{% endif %}"
    )
    parts = TokenizerParts(
        tokenizer_json=FakeTokenizer().backend.to_str().encode(), chat_template=template, special_tokens={}
    )
    tokenizer = ModelTokenizer(parts)
    door = Intake(InputProcessor(MODEL, tokenizer), ["tiny"])
    call = {"function": {"name": "grind", "arguments": '{"x": "c"}'}}
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": ["a", "b"]}, {"role": "assistant", "tool_calls": [call]}],
        "tools": [{"name": "d"}],
        "chat_template_kwargs": {"letters": "e"},
    }
    assert door.process("r1", [[], chat, {}]).token_ids == tokenizer.encode("a\nbcdez")
    continued = {**chat, "messages": [{"role": "assistant", "content": "f"}], "add_generation_prompt": False}
    assert door.process("r1", [[], continued, {}]).token_ids == tokenizer.encode("fde")
    with pytest.raises(RefusedError, match="chat_template_kwargs holds messages, which is no variable"):
        door.process("r1", [[], {**chat, "chat_template_kwargs": {"messages": []}}, {}])


def test_tools_that_the_models_template_would_silently_drop_are_refused() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    parts = TokenizerParts(
        tokenizer_json=FakeTokenizer().backend.to_str().encode(), chat_template=template, special_tokens={}
    )
    door = Intake(InputProcessor(MODEL, ModelTokenizer(parts)), ["tiny"])
    chat = {"messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(RefusedError, match="does not support tools") as refused:
        door.process("r1", [[], {**chat, "tools": [{"name": "d"}]}, {}])
    assert refused.value.error.code == "unsupported"
    assert door.process("r1", [[], {**chat, "tools": []}, {}]).is_chat


@pytest.mark.parametrize(
    "body", [None, 5, [], [[], {}], [[], 7, {}], [7, {}, {}], [[], {}, 9], "abc"], ids=lambda _: ""
)
def test_a_body_of_another_shape_is_refused(intake: Intake, body: Any) -> None:
    with pytest.raises(RefusedError, match="protocol 2"):
        intake.process("r1", body)


def test_a_job_begins_after_the_entries_of_its_stream(intake: Intake) -> None:
    read = incoming(queued_at=1000.0)
    entries = [ChunkEvent("1-2", 1, 2, 0, [10, 11], "ab")]
    claim = StreamClaim(2, list(entries), None)
    request = InputProcessor(MODEL, FakeTokenizer()).process("r1", "abc", SamplingParams())  # type: ignore[arg-type]
    job = generate_job_of(read, request, claim, FakeCeleryRequest(), "", ModelIdentity("tiny"), None, None)
    assert (job.attempt, job.num_tokens, job.queued_at) == (2, 2, 1000.0)
    assert job.core_requests()[0].output_token_ids == [10, 11]


@pytest.mark.parametrize(
    ("priority", "step", "engine"), [(9, 9, 9), (9, 3, 3), (7, 3, 3), (4, 3, 4), (2, 0, 2), (0, 0, 0), (5, 3, 5)]
)
def test_the_engine_gets_the_step_of_a_message_that_has_moved_up_by_its_due_time(
    priority: int, step: int, engine: int
) -> None:
    assert incoming(priority=priority, step=step).engine_priority == engine
