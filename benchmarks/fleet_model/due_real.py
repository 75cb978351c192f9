"""`run`: work with due times on real workers whose engines sleep, in each order of the queue."""

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from fleet_model.agreement import Readings, prompt_of
from fleet_model.arrivals import Request, Sizes
from fleet_model.due_times import ALONE, CHAT, DUE, FIXED, FIXED_PRIORITIES, ORDERS, Work, figures_of
from headrace_broker import Client

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fleet.workers import sleeping_service

SLOTS = 16
STEP_SECONDS = 0.25
_SIZES = Sizes(
    output_median=12, output_sigma=0.5, most_outputs=40, prompt_median=60, prompt_sigma=0.5, most_prompt=200,
    least_prompt=8,
)  # fmt: skip
_SHORT, _LONG, _DAY = 8.0, 32.0, 60.0
_BURST_SECONDS = 1.5
_WARM_REQUESTS = 6
"""Requests for each slot that run before the first order, so that the workers know their speed and costs."""


def run(num_workers: int, seconds: float, seed: int) -> tuple[Work, list[dict[str, Any]]]:
    """Send the same requests in each order. Returns the work and the figures of each order."""
    sample = _SIZES.sample()
    slot_seconds = STEP_SECONDS * sum(output for output, _ in sample) / len(sample)
    slots = num_workers * SLOTS
    burst = int(_BURST_SECONDS * slots / slot_seconds)
    work = Work(slots, slot_seconds, seconds, short=_SHORT, long=_LONG, day=_DAY, burst=burst, sizes=_SIZES)
    arrivals = work.arrivals(Random(seed))
    rows = []
    with sleeping_service(STEP_SECONDS) as service, Client(service.url, model="tiny") as client:
        for _ in range(num_workers):  # one by one: many that load at once take too long on few cores
            service.start_workers(1, slots=SLOTS)
        warm = [(Request(number, 0.0, *_SIZES.draw(Random(number))), CHAT) for number in range(_WARM_REQUESTS * slots)]
        _send(client, warm, "warm", DUE, work)
        for order in ORDERS:
            sent = [each for each in arrivals if order != ALONE or each[1] == CHAT]
            rows.append(figures_of(order, work, _send(client, sent, order.replace(" ", "-"), order, work)))
    return work, rows


def _send(
    client: Client, requests: Sequence[tuple[Request, str]], name: str, order: str, work: Work
) -> list[tuple[str, Request]]:
    """Send the requests at their times. Returns each with its kind and with its times by this process's clock."""
    readings = Readings()
    ids = [f"{name}-{request.number}" for request, _ in requests]
    reader = threading.Thread(target=readings.read, args=(client, ids))
    reader.start()
    began = time.monotonic() + 0.1
    for request_id, (request, kind) in zip(ids, requests, strict=True):
        time.sleep(max(0.0, began + request.sent_at - time.monotonic()))
        readings.sent[request_id] = time.monotonic()
        client.submit(
            prompt_token_ids=prompt_of(request_id, request.num_prompt),
            sampling_params={"max_tokens": request.num_outputs, "ignore_eos": True},
            request_id=request_id,
            priority=_priority(order, kind),
            due=work.window(kind) if order == DUE else None,
        )
    reader.join()
    ended = []
    for request_id, (request, kind) in zip(ids, requests, strict=True):
        each = Request(request.number, readings.sent[request_id] - began, request.num_outputs, request.num_prompt)
        each.first_at, each.ended_at = readings.first[request_id] - began, readings.ended[request_id] - began
        ended.append((kind, each))
    return ended


def _priority(order: str, kind: str) -> int:
    if order == FIXED:
        return FIXED_PRIORITIES[kind]
    return 9 if order == DUE and kind != CHAT else 0
