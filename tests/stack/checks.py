"""What the stack must do: its confinement, its metrics, and that no request is lost when a service is killed."""

import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from stack.progress import progress
from stack.service import SERVICES, Stack, StackError

CELERY_REQUESTS: Final = 100  # more than the worker has slots, so that some wait in Redis
HTTP_REQUESTS: Final = 8
TOKENS: Final = 50
SECONDS: Final = 420
NEW_USER: Final = "user auditor on nopass resetchannels -@all +ping"
AS_NEW_USER: Final = "valkey-cli --no-auth-warning --user auditor --pass any ping | grep PONG"


@dataclass
class Round:
    """One fault, and what became of the requests that were sent before it."""

    fault: str
    sent: int = 0
    pending: int = 0  # requests without an answer at the time of the fault
    by_next_worker: int = 0  # requests without an answer when the fault had started another worker
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # answers that differ from those of an undisturbed round
    seconds: float = 0.0
    healthy_after: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.changed or self.problems)


class Rounds:
    """Rounds of the same requests. The first is undisturbed, and has the answers that the others must give."""

    def __init__(self, stack: Stack, model: str) -> None:
        self._stack, self._model = stack, model
        self._expected: dict[str, str] = {}

    def run(self, name: str, fault: Callable[[Round], None] | None = None) -> Round:
        """Send all requests, make the fault while they are pending, and collect every answer."""
        result, start = Round(name), time.monotonic()
        senders = {
            "Celery": sent(self._stack.send_by_celery(CELERY_REQUESTS, TOKENS, SECONDS)),
            "HTTP": sent(self._stack.send_over_http(HTTP_REQUESTS, TOKENS, SECONDS, self._model)),
        }
        time.sleep(1)  # some of them are being computed
        at = time.time()
        if fault is not None:
            fault(result)
        answers = {f"{kind} {n}": a for kind, process in senders.items() for n, a in collected(process).items()}
        result.seconds = time.monotonic() - start
        result.sent = len(answers)
        result.pending = sum(answer["at"] > at for answer in answers.values())
        if (began := self._stack.started_at("worker")) > at:
            result.by_next_worker = sum(answer["at"] > began for answer in answers.values())
        result.lost = [f"{name}: {answer['error']}" for name, answer in answers.items() if answer["text"] is None]
        if not self._expected:
            self._expected = {name: answer["text"] for name, answer in answers.items()}
        got = {name: answer["text"] for name, answer in answers.items() if answer["text"] is not None}
        result.changed = [name for name, text in got.items() if text != self._expected[name]]
        progress(
            f"{name}: {result.sent} sent, {result.pending} pending at the fault, "
            f"{result.by_next_worker} left to the next worker, {len(result.lost)} lost, {len(result.changed)} changed, "
            f"{result.seconds:.0f} s {'; '.join(result.problems)}"
        )
        for line in result.lost[:3]:
            progress(f"  {line[:300]}")
        return result

    def kill(self, *services: str) -> Round:
        """Kill services while requests are pending. The restart policy must start them again."""

        def fault(result: Round) -> None:
            before = {service: self._stack.restart_count(service) for service in services}
            for service in services:
                self._stack.kill(service)
            started = time.monotonic()
            for service in services:
                self._stack.wait_until_restarted(service, before[service])
            result.healthy_after = time.monotonic() - started
            result.problems += refused_writes(self._stack)

        return self.run(f"kill {' and '.join(services)}", fault)

    def change_users(self) -> Round:
        """Start the stack with a changed ACL while requests are pending. The change must be in force."""

        def fault(result: Round) -> None:
            if self._stack.succeeds("redis", AS_NEW_USER)[0]:
                result.problems.append("the new user was there before")
            self._stack.change_users(NEW_USER)
            started = time.monotonic()
            self._stack.up()
            result.healthy_after = time.monotonic() - started
            if not self._stack.succeeds("redis", AS_NEW_USER)[0]:
                result.problems.append("the changed ACL is not in force")

        return self.run("up -d with a changed ACL", fault)


def sent(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """Wait until a sender has sent its requests."""
    assert process.stdout is not None
    if process.stdout.readline() != "sent\n":
        raise StackError(f"requests could not be sent: status {process.wait()}, {process.stdout.read()[-1000:]}")
    return process


def collected(process: subprocess.Popen[str]) -> dict[str, dict[str, Any]]:
    """Return what a sender has collected. It ends by itself."""
    assert process.stdout is not None
    output = process.stdout.read()
    try:
        answers: dict[str, dict[str, Any]] = json.loads(output)
    except ValueError:
        raise StackError(f"requests ended with status {process.wait()}: {output[-1000:]}") from None
    return answers


def refused_writes(stack: Stack) -> list[str]:
    """Return what Redis did not load of its append-only file, which has lost requests then."""
    refused = stack.compose("logs", "--no-log-prefix", "redis").count("== CRITICAL ==")
    return [f"Redis refused {refused} writes of its append-only file"] if refused else []


def confinement_problems(stack: Stack) -> list[str]:
    """Return what a service may do though it must not: write to its image, keep capabilities, gain rights."""
    problems = []
    for service in SERVICES:
        if stack.succeeds(service, "touch /written 2>/dev/null")[0]:
            problems.append(f"{service} can write to its root")
        _, status = stack.succeeds(service, "cat /proc/1/status")
        if not re.search(r"^CapEff:\s*0+$", status, re.MULTILINE) or not re.search(
            r"^CapBnd:\s*0+$", status, re.MULTILINE
        ):
            problems.append(f"{service} has capabilities")
        if not re.search(r"^NoNewPrivs:\s*1$", status, re.MULTILINE):
            problems.append(f"{service} can gain rights")
        if re.search(r"^Uid:\s*0\s", status, re.MULTILINE):
            problems.append(f"{service} runs as root")
        if "max-size" not in stack.inspect(service)["HostConfig"]["LogConfig"]["Config"]:
            problems.append(f"{service} has a log without a bound")
    log = stack.compose("logs", "--no-log-prefix", "worker")
    if "superuser" in log:
        problems.append("Celery warns of superuser privileges")
    torch = "cd /opt/headrace/lib/python3*/site-packages/torch && ls -d test include bin/protoc 2>/dev/null"
    leftovers = stack.succeeds("worker", torch)[1].split()
    return problems + [f"the worker's image has torch/{leftover}" for leftover in leftovers]


def prometheus_problems(stack: Stack) -> tuple[list[str], dict[str, float]]:
    """Return what the real Prometheus does not scrape or evaluate, and its lookups of names so far."""

    def ask(path: str) -> str:
        found, body = stack.succeeds("prometheus", f"wget -q -O - 'http://127.0.0.1:9090{path}'")
        if not found:
            raise StackError(f"Prometheus does not answer {path}")
        return body

    problems = []
    targets = json.loads(ask("/api/v1/targets"))["data"]["activeTargets"]
    up = sorted(target["labels"]["job"] for target in targets if target["health"] == "up")
    if up != ["headrace-exporter", "headrace-gateway", "headrace-worker"] or len(targets) != len(up):
        problems.append(f"Prometheus scrapes {up} of {len(targets)} targets")
    rules = [rule for group in json.loads(ask("/api/v1/rules"))["data"]["groups"] for rule in group["rules"]]
    file = stack.folder / "monitoring" / "prometheus" / "rules.yml"
    groups = yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
    wanted = [rule.get("alert", rule.get("record")) for group in groups for rule in group["rules"]]
    if sorted(rule["name"] for rule in rules) != sorted(wanted):
        problems.append(f"Prometheus has {len(rules)} rules, not the {len(wanted)} of {file.name}")
    problems += [f"rule {rule['name']}: {rule['lastError']}" for rule in rules if rule["health"] == "err"]
    series = json.loads(ask("/api/v1/query?query=headrace_queue_received_messages_total"))["data"]["result"]
    if not series:
        problems.append("Prometheus has no series of the worker")
    counters = dict(re.findall(r"^(prometheus_sd_dns_\w+_total) (\S+)$", ask("/metrics"), re.MULTILINE))
    return problems, {name: float(value) for name, value in counters.items()}
