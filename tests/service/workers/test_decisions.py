"""Decisions through a real server and real workers of a tiny Llama."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from headrace_broker import BrokerSettings, Client
from headrace_broker.streams.events import ChunkEvent, StartEvent
from service.servers import make_server
from service.workers.service import DEADLINE, QUEUE, Service

TEXT = "the river turns the mill " * 6
PREDICATE = {"type": "predicate", "instructions": "The mill is on the river.", "name": "mill"}
CHOICE = {"type": "choice", "instructions": "Where is it?", "choices": [{"value": True}, {"value": "true"}]}
SCORE = {"type": "score", "instructions": "How old?", "levels": [{"label": each} for each in ("new", "old", "ruin")]}
QUESTIONS = [PREDICATE, CHOICE, SCORE]


@pytest.fixture(scope="module")
def served(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Client]]:
    folder = tmp_path_factory.mktemp("service")
    with make_server() as server:
        service = Service(server, model_folder, folder)
        try:
            service.start_worker(dtype="float32").wait_ready()
            with Client(BrokerSettings(redis_url=service.url), model="tiny") as client:
                yield service, client
        finally:
            service.close()


def test_every_producer_gets_the_same_answers(served: tuple[Service, Client]) -> None:
    service, client = served
    decided = client.decide(TEXT, QUESTIONS, timeout=DEADLINE)
    assert [answer["type"] for answer in decided.answers] == ["predicate", "choice", "score"]
    assert decided.usage.completion_tokens == 3
    kwargs = {"input": TEXT, "questions": QUESTIONS}
    by_celery = service.app.send_task("headrace.decide", kwargs=kwargs, queue=QUEUE).get(timeout=DEADLINE)
    assert by_celery["answers"] == decided.answers
    assert (by_celery["error"], by_celery["usage"]["prompt_tokens"]) == (None, decided.usage.prompt_tokens)
    with Celery("json", broker=service.url, backend=service.url, set_as_current=False) as app:
        by_json = app.send_task("headrace.decide", kwargs=kwargs, queue=QUEUE).get(DEADLINE)
    assert by_json["answers"] == json.loads(json.dumps(decided.answers))


def test_the_input_of_another_tenant_is_not_found_in_the_prefix_cache(served: tuple[Service, Client]) -> None:
    _, client = served
    text = TEXT + "at night"

    def cached(tenant: str) -> int:
        return client.decide(text, [PREDICATE], tenant=tenant, timeout=DEADLINE).usage.cached_tokens

    assert (cached("a"), cached("b")) == (0, 0)
    assert cached("a") > 0


@pytest.mark.parametrize(
    ("kwargs", "code", "told"),
    [
        ({"input": "", "questions": [PREDICATE]}, "invalid_request", "input must be a string of at least 1 characters"),
        ({"input": "x", "questions": []}, "invalid_request", "questions must hold 1 to 400 questions, got 0"),
        ({"input": "x", "prompt": "y"}, "invalid_request", "unknown key 'prompt'; questions must be given"),
        ({"input": TEXT * 100, "questions": [PREDICATE]}, "context_length_exceeded", "maximum context length"),
        ({"input": "x", "questions": [PREDICATE], "model": "other"}, "model_not_found", "'other' is not served here"),
    ],
)
def test_a_wrong_message_gets_its_problems(
    served: tuple[Service, Client], kwargs: dict[str, Any], code: str, told: str
) -> None:
    service, _ = served
    result = service.app.send_task("headrace.decide", kwargs=kwargs, queue=QUEUE).get(timeout=DEADLINE)
    assert (result["answers"], result["error"]["code"]) == (None, code)
    assert told in result["error"]["message"]


def test_questions_with_more_options_than_letters_are_answered(served: tuple[Service, Client]) -> None:
    _, client = served
    many = {"type": "choice", "instructions": "Which?", "choices": [{"value": str(each)} for each in range(255)]}
    (answer,) = client.decide(TEXT, [many], timeout=DEADLINE).answers
    assert sum(each["probability"] for each in answer["probabilities"]) == pytest.approx(1)


def test_a_decision_that_was_cancelled_in_the_queue_has_no_answers(served: tuple[Service, Client]) -> None:
    service, client = served
    assert client.cancel("gone")
    kwargs = {"input": TEXT, "questions": QUESTIONS}
    sent = service.app.send_task("headrace.decide", kwargs=kwargs, queue=QUEUE, task_id="gone")
    result = sent.get(timeout=DEADLINE)
    assert (result["answers"], result["error"]["code"]) == (None, "cancelled")


def test_after_kill_9_of_a_worker_each_question_is_read_once_and_the_answers_are_the_same(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    questions = [{**PREDICATE, "instructions": f"The mill has {number} wheels."} for number in range(200)]
    options = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64}
    first = service.start_worker(**options).wait_ready()
    kwargs = {"input": TEXT, "questions": questions}
    handle = service._keep(service.app.send_task("headrace.decide", kwargs=kwargs, queue=QUEUE))
    service.wait_tokens([handle.id], 20)
    first.kill()
    service.start_worker(**options).wait_ready()
    answers = handle.get(timeout=DEADLINE)["answers"]
    with Client(BrokerSettings(redis_url=service.url), model="tiny") as client:
        events = list(client.events(handle.id))
        assert sum(isinstance(event, StartEvent) for event in events) == 2
        read = Counter(event.index for event in events if isinstance(event, ChunkEvent))
        assert read == Counter(range(200))
        assert answers == client.decide(TEXT, questions, timeout=DEADLINE).answers
