"""Any Celery program can be a producer: the one here asserts that it imports no package of Headrace."""

import json
import os
import subprocess
import sys

from celery import Celery

from service.workers.service import DEADLINE, QUEUE, Service, assert_result_is_stream, results

PRODUCER = """
import json, sys
from celery import Celery

url, count = sys.argv[1], int(sys.argv[2])
app = Celery("anybody", broker=url, backend=url)
app.conf.update(task_serializer="msgpack", result_serializer="msgpack", accept_content=["msgpack"])
handles = [
    app.send_task(
        "headrace.generate",
        kwargs={
            "prompt": f"number {number} asks the wheel",
            "sampling_params": {"temperature": 0, "max_tokens": 4 + number % 13, "ignore_eos": True},
        },
        queue="headrace.tiny",
        priority=number % 10,
    )
    for number in range(count)
]
print(json.dumps({handle.id: handle.get(timeout=100) for handle in handles}))
assert not any(name.startswith("headrace") for name in sys.modules)
"""


PYTHON = os.environ.get("HEADRACE_TEST_PRODUCER", sys.executable)
"""`make matrix` names the interpreter of another environment, which has Celery and no Headrace."""


def test_256_requests_of_a_foreign_process_finish_with_every_token_once_and_in_order(service: Service) -> None:
    worker = service.workers[0]
    before = worker.metrics()
    producer = subprocess.run(
        [PYTHON, "-c", PRODUCER, service.server.url, "256"], capture_output=True, timeout=120, check=False
    )
    assert producer.returncode == 0, producer.stderr.decode()[-2000:] + service.logs()
    answers = json.loads(producer.stdout)
    assert len(answers) == 256
    logs = service.wait_ended(answers)
    for number, (request_id, result) in enumerate(answers.items()):
        log = logs[request_id]
        assert log.attempts  # more than one if one of a better priority preempted it
        assert log.num_tokens == 4 + number % 13
        assert log.end is not None
        assert (log.end["finish_reason"], log.end["error"]) == ("length", None)
        assert result["request_id"] == request_id
        assert_result_is_stream(result, log)
    service.wait_settled()
    assert service.dead_letters() == []

    after = worker.metrics()
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    usages = [result["usage"] for result in answers.values()]
    assert grown["headrace_generation_tokens_total"] == sum(log.num_tokens for log in logs.values())
    assert grown['headrace_requests_total{outcome="length"}'] == 256
    returned = sum(value for name, value in grown.items() if name.startswith("headrace_queue_returned_messages_total"))
    assert grown["headrace_queue_received_messages_total"] == 256 + returned
    for source, count in (
        ("cached", sum(usage["cached_tokens"] for usage in usages)),
        ("computed", sum(usage["prompt_tokens"] - usage["cached_tokens"] for usage in usages)),
    ):
        assert grown[f'headrace_prompt_tokens_total{{source="{source}"}}'] == count
    assert after["headrace_requests_in_flight"] == 0


def test_chats_with_tool_calls_and_text_parts_are_answered_and_null_is_the_default(service: Service) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "grind", "arguments": '{"grain": "rye"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "flour"}, {"type": "text", "text": "please"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    params = {"temperature": None, "top_p": None, "max_tokens": None, "seed": 1, "ignore_eos": True}
    whole = service.send({"messages": messages, "sampling_params": params})
    plain = service.send(
        {"messages": [{**messages[0], "content": "flour\nplease"}, *messages[1:]], "sampling_params": params}
    )
    answers = [handle.get(timeout=60) for handle in (whole, plain)]
    assert [answer["error"] for answer in answers] == [None, None]
    assert [len(answer["outputs"][0]["token_ids"]) for answer in answers] == [16, 16]
    assert answers[0]["outputs"][0]["token_ids"] == answers[1]["outputs"][0]["token_ids"]
    refused = service.send({"messages": messages, "tools": [{"name": "grind"}], "sampling_params": params})
    error = refused.get(timeout=60)["error"]  # this model's template would silently drop them
    assert error["code"] == "unsupported"


def test_a_task_name_from_a_message_is_not_logged(service: Service) -> None:
    named = service.send({"prompt": "x", "sampling_params": {"max_tokens": 1}}, shadow="Zanzibar")
    results([named])
    assert f"headrace.generate[{named.id}]" in service.workers[0].log_text()
    assert "Zanzibar" not in service.workers[0].log_text()


def test_a_request_may_have_more_choices_than_the_worker_has_slots(service: Service) -> None:
    crowd = service.generate(n=40, temperature=1.0, seed=3, max_tokens=6)
    others = [service.generate(max_tokens=6) for _ in range(3)]
    answers = results([crowd, *others])
    log = service.stream(crowd.id)
    assert sorted(log.choices) == list(range(40))
    assert all(len(choice.token_ids) == 6 for choice in log.choices.values())
    assert len({choice.text for choice in log.choices.values()}) > 30
    assert_result_is_stream(answers[crowd.id], log)
    service.wait_settled()


def test_the_ten_priority_steps_of_celerys_documentation_are_served(service: Service) -> None:
    app = Celery("ten", broker=service.url, backend=service.url, set_as_current=False)
    app.conf.broker_transport_options = {"priority_steps": list(range(10)), "queue_order_strategy": "priority"}
    handles = [
        app.send_task("headrace.generate", kwargs={"prompt": "a"}, queue=QUEUE, priority=priority)
        for priority in range(10)
    ]
    assert [len(handle.get(timeout=DEADLINE)["outputs"]) for handle in handles] == [1] * 10


def test_a_list_with_celerys_other_separator_is_reported_once_in_the_log(service: Service) -> None:
    app = Celery("colon", broker=service.url, set_as_current=False)
    app.conf.broker_transport_options = {"sep": ":"}
    app.send_task("headrace.generate", kwargs={"prompt": "a"}, queue=QUEUE, priority=5)
    line = rf"no worker reads the list '{QUEUE}:3': leave the option sep of its producers unset"
    service.workers[0].wait_for_log(line)
    assert service.client.delete(f"{QUEUE}:3") == 1
