"""An upgrade of docker-compose.yml by the steps of docs/upgrade.md, while requests are pending."""

import time
from pathlib import Path

from stack.checks import Round, Rounds, refused_writes
from stack.progress import progress
from stack.service import BUILT, SERVICES, Stack


def upgraded(stack: Stack, rounds: Rounds, files: Path) -> Round:
    """Exchange the services for those of a later version. Workers of the earlier one hold requests then."""
    stack.change_version(files)
    progress("building the images of the later version")
    stack.build()

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

    result = rounds.run("up -d with the later version", fault)
    if not result.by_next_worker:
        result.problems.append("no request was left to the next worker")
    return result
