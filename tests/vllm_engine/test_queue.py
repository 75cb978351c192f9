"""vLLM behind the queue, as a plain Celery producer and a reader of Redis streams see it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_engine import LLM
from service.servers import make_server
from service.workers.service import QUEUE, Service, results
from vllm_engine.conftest import BENCHMARKS
from vllm_engine.driven_engine import DrivenEngine

PATIENCE = 900.0
QUESTIONS = [
    {"type": "predicate", "instructions": "The mill is on the river."},
    {"type": "score", "instructions": "How old?", "levels": [{"label": "new"}, {"label": "old"}, {"label": "ruin"}]},
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def service(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    settings = {**options, "engine_args": json.dumps(options["engine_args"]), "device": "auto", "max_num_seqs": 64}
    del settings["model"], settings["scheduling_policy"]
    with make_server(appendonly=True) as server:
        service = Service(server, options["model"], tmp_path_factory.mktemp("vllm"))
        try:
            service.start_worker(**settings).wait_ready(PATIENCE)
            yield service
        finally:
            service.close()


def test_the_benchmarks_requests_give_the_tokens_of_the_reference(
    service: Service, workload: list[dict[str, Any]]
) -> None:
    expected = json.loads((BENCHMARKS / "expected_fp32.json").read_text())
    handles = [
        service.send(
            {
                "prompt_token_ids": request["prompt_token_ids"],
                "sampling_params": {"temperature": 0.0, "max_tokens": request["max_tokens"], "ignore_eos": True},
            }
        )
        for request in workload
    ]
    service.wait_ended([handle.id for handle in handles], PATIENCE)
    answers = results(handles)
    given = [answers[handle.id]["outputs"][0]["token_ids"] for handle in handles]
    assert given == expected


def test_a_request_goes_on_where_it_was_when_the_engine_is_killed(service: Service, engine: DrivenEngine) -> None:
    params = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7, "n": 2, "presence_penalty": 0.5}]
    if engine.process.capabilities.exact_resume != "all":
        del params[1]
    undisturbed = [service.generate(max_tokens=200, **each) for each in params]
    expected = [service.wait_ended([handle.id], PATIENCE)[handle.id].content for handle in undisturbed]
    handles = [service.generate(max_tokens=200, **each) for each in params]
    service.wait_tokens([handle.id for handle in handles], at_least=20)
    os.kill(service.workers[0].engine_pid(), signal.SIGKILL)
    logs = service.wait_ended([handle.id for handle in handles], PATIENCE)
    assert [logs[handle.id].content for handle in handles] == expected
    assert all(result["error"] is None for result in results(handles).values())


def test_decisions_have_the_probabilities_of_headrace_s_engine(service: Service, options: dict[str, Any]) -> None:
    given = {"input": "The mill stands on the river.", "questions": QUESTIONS}
    beside = service.generate(max_tokens=20, logprobs=3)  # vLLM gives requests of a batch what one of them asks for
    found = service.app.send_task("headrace.decide", kwargs=given, queue=QUEUE).get(timeout=PATIENCE)
    (choice,) = results([beside])[beside.id]["outputs"]
    assert {len(position) for position in choice["logprobs"]} <= {3, 4}
    llm = LLM(options["model"], dtype="float32", max_model_len=1024, num_blocks=64)
    expected = llm.decide(given["input"], QUESTIONS)["answers"]
    llm.close()
    assert [answer["type"] for answer in found["answers"]] == ["predicate", "score"]
    assert found["answers"][0]["probability"] == pytest.approx(expected[0]["probability"], abs=1e-3)
    assert found["answers"][1]["score"] == pytest.approx(expected[1]["score"], abs=1e-3)


def test_structured_outputs_come_in_their_form(service: Service) -> None:
    schema = service.generate(ignore_eos=False, max_tokens=200, structured_outputs={"json": json.dumps(SCHEMA)})
    choice = service.generate(ignore_eos=False, structured_outputs={"choice": ["red", "blue"]}, max_tokens=20)
    answers = results([schema, choice])
    document = json.loads(answers[schema.id]["outputs"][0]["text"])
    assert set(document) == {"name", "age"}
    assert answers[choice.id]["outputs"][0]["text"] in ("red", "blue")


def test_log_probabilities_begin_with_the_drawn_token(service: Service) -> None:
    handle = service.generate(logprobs=3, prompt_logprobs=2)
    result = results([handle])[handle.id]
    output = result["outputs"][0]
    assert len(output["logprobs"]) == len(output["token_ids"])
    assert [position[0][0] for position in output["logprobs"]] == output["token_ids"]
    assert all(len(position) == 3 for position in output["logprobs"])  # the drawn one is the best
    assert len(result["prompt_logprobs"]) == result["usage"]["prompt_tokens"]
    assert result["prompt_logprobs"][0] is None


def test_a_repeated_prompt_comes_from_the_prefix_cache(service: Service) -> None:
    prompt = "The wheel turns beside the mill, and the water runs below it. " * 30
    first, second = (service.generate(prompt, max_tokens=2) for _ in range(2))
    service.wait_ended([first.id], PATIENCE)
    again = service.generate(prompt, max_tokens=2)
    assert results([second, again])[again.id]["usage"]["cached_tokens"] >= 128


def test_a_better_priority_is_served_first(service: Service) -> None:
    handles = [
        service.send(
            {"prompt": f"request {number}", "sampling_params": {"max_tokens": 60, "ignore_eos": True}}, priority=9
        )
        for number in range(200)
    ]
    better = service.send({"prompt": "request", "sampling_params": {"max_tokens": 2, "ignore_eos": True}}, priority=0)
    service.wait_ended([better.id], PATIENCE)
    assert sum(service.stream(handle.id).end is None for handle in handles) > 50
    service.wait_ended([handle.id for handle in handles], PATIENCE)


def test_what_vllm_cannot_do_is_refused_by_name(service: Service) -> None:
    handle = service.generate(temperature=2.5)
    error = results([handle])[handle.id]["error"]
    assert error["code"] == "invalid_request"
    assert "temperature" in error["message"]


def test_adapters_are_refused_where_vllm_gives_others_requests_their_weights(
    options: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**options, "engine_args": json.dumps(options["engine_args"]), "device": "auto"}
    del settings["model"], settings["scheduling_policy"]
    with make_server() as server:
        service = Service(server, options["model"], tmp_path)
        try:
            worker = service.start_worker(**settings, lora_modules=f"alpha={tmp_path}")
            assert worker.wait(PATIENCE) != 0
            assert "0.33" in worker.log_text()
        finally:
            service.close()
