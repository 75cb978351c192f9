"""After kill -9 of a worker under load, another resumes each request at the exact next token."""

from collections.abc import Callable
from typing import Any

import pytest
from celery.result import AsyncResult

from service.workers.service import Service, StreamLog, assert_result_is_stream, results

TOKENS = 300
REPETITION = {"max_pattern_size": 8, "min_count": 5}


def greedy(number: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}


def sampled(number: int) -> dict[str, Any]:
    """Seeds, two choices, log-probabilities, penalties and stop strings: everything that depends on the past."""
    params: dict[str, Any] = {"temperature": 0.9, "seed": number, "n": 2, "max_tokens": TOKENS, "ignore_eos": True}
    if number % 2:
        # never reached, so that text is always held back
        params["stop"] = ["the mill wheel that never turned", "zzzzzzz"]
    if number % 4 == 0:
        params |= {"logprobs": 2, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    if number % 4 == 1:
        params |= {"bad_words": ["e", "the w"], "logit_bias": {"77": 1.5, "90": -100}, "prompt_logprobs": 1}
    if number % 4 == 2:
        params |= {"detokenize": False, "stream_interval": 7, "logprobs": 0, "prompt_logprobs": 0}
        params |= {"allowed_token_ids": list(range(40, 140)), "repetition_detection": REPETITION}
    return params


def early_stop(number: int) -> dict[str, Any]:
    """Choices that end at different times, on different stop strings."""
    return {
        "temperature": 1.0,
        "seed": number,
        "n": 2,
        "max_tokens": TOKENS,
        "stop": ["ee", "th", "q"],
        "include_stop_str_in_output": bool(number % 2),
        "min_tokens": 5 * number,
    }


def structured(number: int) -> dict[str, Any]:
    """Grammars that must resume in the same state at every cut. Some allow an end long before max_tokens."""
    forms: list[dict[str, Any]] = [
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 80}},
        {"regex": "([a-m]{5}-[n-z]{5}\\.){12,20}"},
        {"grammar": 'start: pair{40,60}\npair: "(" pair? ")"'},
        {"choice": ["the mill wheel turns " * 8, "the stone grinds " * 10]},
    ]
    return {"temperature": 1.0, "seed": number, "n": 2, "max_tokens": TOKENS, "structured_outputs": forms[number % 4]}


def send_all(service: Service, params: Callable[[int], dict[str, Any]], count: int) -> list[AsyncResult]:
    return [
        service.send({"prompt": f"The wheel turns {number} times", "sampling_params": params(number)})
        for number in range(count)
    ]


def ordered(handles: list[AsyncResult], logs: dict[str, StreamLog]) -> list[StreamLog]:
    return [logs[handle.id] for handle in handles]


def mixed(number: int) -> dict[str, Any]:
    """Without log-probabilities: padded to another shape, a step's logits may differ in their last bits."""
    params = {**(sampled, early_stop, structured)[number % 3](number), "max_tokens": 50, "min_tokens": 0}
    params.pop("logprobs", None)
    return params


@pytest.mark.parametrize(
    ("params", "count", "device", "publish_interval"),
    [
        (greedy, 32, "cpu", 0),
        (sampled, 16, "cpu", 0.05),
        (early_stop, 16, "cpu", 0),
        (structured, 16, "cpu", 0.02),
        (mixed, 6, "static-cpu", 0),
    ],
)
def test_a_second_worker_resumes_the_requests_of_a_killed_one_without_a_difference(
    make_service: Callable[..., Service],
    params: Callable[[int], dict[str, Any]],
    count: int,
    device: str,
    publish_interval: float,
) -> None:
    service = make_service()
    settings = {"lease_seconds": 2, "device": device, "publish_interval": publish_interval}
    first = service.start_worker(**settings).wait_ready()
    handles = send_all(service, params, count)
    undisturbed = ordered(handles, service.wait_ended([handle.id for handle in handles]))
    service.wait_settled()

    handles = send_all(service, params, count)
    ids = [handle.id for handle in handles]
    service.wait_tokens(ids[-1:], at_least=3)  # the last to begin; reading all streams takes as long as some requests
    first.kill()
    first.assert_nothing_left()
    cut = {request_id: service.stream(request_id).num_tokens for request_id in ids}
    second = service.start_worker(**settings)
    disturbed = ordered(handles, service.wait_ended(ids))

    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after.content == before.content
        assert after.prompt_logprobs == before.prompt_logprobs
        assert before.end is not None
        assert after.end is not None
        assert after.end["finish_reason"] == before.end["finish_reason"]
        assert after.end["error"] is None
    answers = results(handles)
    for handle, log in zip(handles, disturbed, strict=True):
        assert_result_is_stream(answers[handle.id], log)
    continued = [log for log in disturbed if len(log.attempts) == 2]
    assert continued, f"the kill came too late: {cut}"
    service.wait_settled()
    assert second.metrics()["headrace_requests_in_flight"] == 0
