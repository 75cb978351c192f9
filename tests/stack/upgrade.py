"""An upgrade of docker-compose.yml and the way back, by the steps of docs/upgrade.md, while requests are pending."""

import json
import time
from pathlib import Path
from typing import Final

from stack.checks import Round, Rounds, refused_writes
from stack.progress import progress
from stack.service import BUILT, SERVICES, Stack

_POLL_SECONDS: Final = 1.0


def upgraded(stack: Stack, rounds: Rounds, files: Path) -> Round:
    """Exchange the services for those of a later version. Workers of the earlier one hold requests then."""
    stack.change_version(files)
    progress("building the images of the later version")
    stack.build()
    return _exchanged(stack, rounds, "up -d with the later version")


def returned(stack: Stack, rounds: Rounds, files: Path, model: str) -> Round:
    """Exchange the services for those of an earlier version. No worker has sorted the requests that are pending."""
    _drain(stack, model)
    stack.change_version(files)
    progress("building the images of the earlier version")
    stack.build()
    return _exchanged(stack, rounds, "up -d with the earlier version")


def _exchanged(stack: Stack, rounds: Rounds, name: str) -> Round:
    def fault(result: Round) -> None:
        before = {service: stack.inspect(service)["Image"] for service in BUILT}
        started = time.monotonic()
        stack.up()
        stack.compose("kill", "--signal", "HUP", "prometheus")
        result.healthy_after = time.monotonic() - started
        for service in SERVICES:
            found = stack.inspect(service)
            if service in BUILT and found["Image"] == before[service]:
                result.problems.append(f"{service} has the image of before")
            if restarts := found["RestartCount"]:
                result.problems.append(f"{service} was restarted {restarts} times")
        result.problems += refused_writes(stack)

    result = rounds.run(name, fault)
    if not result.by_next_worker:
        result.problems.append("no request was left to the next worker")
    return result


def _drain(stack: Stack, model: str) -> None:
    """Wait until the queue is empty, then stop the workers. What is sent afterwards, no worker sorts."""
    progress("waiting for an empty queue, and stopping the worker")
    command = ("headrace", "queue", "list", "--model", model, "--json")
    while any(_requests(one) for one in json.loads(stack.compose("exec", "-T", "worker", *command))):
        time.sleep(_POLL_SECONDS)
    stack.compose("stop", "worker")


def _requests(queue: dict[str, int]) -> int:
    return queue["waiting"] + queue["delayed"] + queue["running"]
