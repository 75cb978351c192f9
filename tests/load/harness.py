"""The cost of a worker under more load than it can serve for minutes, on an engine that only sleeps."""

import json
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace_broker import Client
from headrace_broker.client.submission import SubmitRequest
from headrace_cli.demo.stream_timing import percentile
from load.processes import cpu_seconds, resident_mib
from service.workers.service import Service
from service.workers.worker_process import WorkerProcess

TESTS = Path(__file__).parents[1]
SAMPLE_SECONDS = 2.0
ONE_TOKEN_REQUESTS = 1000
GROWTH_MIB_A_MINUTE = 1.0
"""The limit for the growth of a process in the second half of the run."""
_BRIEF_MILLISECONDS = 10_000
"""Idle workers write keys that expire sooner, such as that of the reaper."""


@dataclass(frozen=True)
class Plan:
    """The load, and the speed of the engine."""

    requests: int = 10_000
    tokens: int = 50
    subscribers: int = 1_000
    step_seconds: float = 0.075
    slots: int = 64
    light_share: float = 0.02
    """The light tenant's share of the requests, sent one by one; the heavy tenant's all wait from the start."""
    ttl_seconds: int = 60
    seed: int = 1

    @property
    def seconds(self) -> float:
        """How long the engine sleeps for all requests; the run takes longer than this."""
        return self.requests * self.tokens / self.slots * self.step_seconds


@dataclass
class Sample:
    """The state at one moment; memory in MiB."""

    seconds: float
    worker: float
    engine: float
    redis: float
    subscribers: float
    redis_data: float
    keys: int
    queued: int
    listening: int
    """Connections in a blocking read: all subscribers except those that have just received an entry."""


@dataclass
class Report:
    """All measurements."""

    plan: Plan
    seconds: float = 0.0
    chunks: int = 0
    cpu: dict[str, float] = field(default_factory=dict)
    """Seconds of processor time by process, while the load ran."""
    publish: dict[str, float] = field(default_factory=dict)
    worker_us_a_request: float = 0.0
    """For a request of one token."""
    waits: dict[str, dict[str, float]] = field(default_factory=dict)
    """Tenant -> p50 and p99 of the wait in the queue and of the time to the first token, in seconds."""
    samples: list[Sample] = field(default_factory=list)
    keys_before: set[str] = field(default_factory=set)
    keys_after: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    @property
    def publisher_us_a_chunk(self) -> float:
        return self.publish["cpu_seconds"] / self.publish["entries"] * 1e6

    @property
    def worker_us_a_chunk(self) -> float:
        """The worker's processor time per chunk, without the cost of each request."""
        of_requests = self.plan.requests * self.worker_us_a_request
        return (self.cpu["worker"] * 1e6 - of_requests) / self.chunks

    def growth(self, name: str) -> float:
        """Return MiB per minute in the second half of the run: the slope of a straight line through the samples."""
        half = [s for s in self.samples if s.seconds > self.seconds / 2]
        if len(half) < 3:
            return 0.0
        return statistics.linear_regression([s.seconds / 60 for s in half], [getattr(s, name) for s in half]).slope


class Harness:
    """Args:
    service: has no worker; the harness starts its own.
    folder: folder for the files of this run.
    set_variable: sets an environment variable for the processes.
    """

    def __init__(self, service: Service, plan: Plan, folder: Path, set_variable: Callable[[str, str], None]) -> None:
        self._service = service
        self._set_variable = set_variable
        self._plan = plan
        self._folder = folder
        self._publish_file = folder / "publish.json"
        self._account_file = folder / "subscribers.json"
        self._draw = random.Random(plan.seed)
        self._sent: dict[str, tuple[str, float]] = {}
        """Request id -> tenant and unix time of sending."""
        self.report = Report(plan)

    def run(self) -> Report:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_most_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for name, value in {
            "PYTHONPATH": str(TESTS),
            "LOAD_STEP_SECONDS": str(self._plan.step_seconds),
            "LOAD_PUBLISH_FILE": str(self._publish_file),
        }.items():
            self._set_variable(name, value)
        worker = self._service.start_worker(
            command=[sys.executable, "-m", "load.worker"],
            max_num_seqs=self._plan.slots,
            result_ttl_seconds=self._plan.ttl_seconds,
            tenants="heavy,light",
        ).wait_ready()
        with Client(self._service.server.url, model="tiny") as client:
            self._measure_requests(client, worker)
            self._forget_requests()
            self._measure_load(client, worker)
        self._check_keys()
        worker.process.terminate()
        worker.wait()
        self.report.publish = json.loads(self._publish_file.read_text())
        self._judge()
        return self.report

    def _measure_requests(self, client: Client, worker: WorkerProcess) -> None:
        """Measure the cost of requests with one chunk, after as many requests for warm-up."""
        for measured in (False, True):
            before = cpu_seconds(worker.process.pid)
            count = min(ONE_TOKEN_REQUESTS, self._plan.requests)
            client.submit_many([self._request("heavy", 1) for _ in range(count)])
            self._service.wait_settled(600)
            if measured:
                self.report.worker_us_a_request = (cpu_seconds(worker.process.pid) - before) / count * 1e6

    def _measure_load(self, client: Client, worker: WorkerProcess) -> None:
        redis_pid = self._service.server.pid
        assert redis_pid is not None
        subscribers = self._start_subscribers()
        pids = {
            "worker": worker.process.pid,
            "engine": worker.engine_pid(),
            "redis": redis_pid,
            "subscribers": subscribers.pid,
        }
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        cpu = dict(before)
        started = time.monotonic()
        light = threading.Thread(target=self._send_light, args=(client, subscribers), daemon=True)
        try:
            self._send_heavy(client, subscribers)
            light.start()
            while subscribers.poll() is None:
                assert worker.process.poll() is None, worker.log_text()[-4000:]
                cpu |= {name: cpu_seconds(pid) for name, pid in pids.items() if _lives(pid)}
                self._sample(pids, time.monotonic() - started)
                time.sleep(SAMPLE_SECONDS)
        finally:
            subscribers.kill()
            subscribers.wait()
        self.report.seconds = time.monotonic() - started
        assert subscribers.returncode == 0, "the subscribers failed; see their error above"
        cpu |= {name: cpu_seconds(pid) for name, pid in pids.items() if _lives(pid)}
        self.report.cpu = {name: round(cpu[name] - before[name], 2) for name in pids}
        self._read_account()

    def _start_subscribers(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "load.subscribers", self._service.server.url]
        command += [str(self._plan.subscribers), str(self._account_file)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def _request(self, tenant: str, tokens: int | None = None) -> SubmitRequest:
        return {
            "prompt": f"The wheel turns {self._draw.randrange(10**6)} times",
            "sampling_params": {"max_tokens": tokens or self._plan.tokens, "ignore_eos": True},
            "tenant": tenant,
        }

    def _send_heavy(self, client: Client, subscribers: "subprocess.Popen[str]") -> None:
        left = self._plan.requests - self._num_light
        while left > 0:
            count = min(left, 500)
            sent_at = time.time()
            for request_id in client.submit_many([self._request("heavy") for _ in range(count)]):
                self._follow(subscribers, request_id, "heavy", sent_at, at_once=False)
            left -= count

    @property
    def _num_light(self) -> int:
        return max(1, round(self._plan.requests * self._plan.light_share))

    def _send_light(self, client: Client, subscribers: "subprocess.Popen[str]") -> None:
        """Send requests evenly over nine tenths of the time that the engine needs."""
        for _ in range(self._num_light):
            sent_at = time.time()
            [request_id] = client.submit_many([self._request("light")])
            self._follow(subscribers, request_id, "light", sent_at, at_once=True)
            time.sleep(0.9 * self._plan.seconds / self._num_light)
        assert subscribers.stdin is not None
        subscribers.stdin.close()

    def _follow(
        self, subscribers: "subprocess.Popen[str]", request_id: str, tenant: str, sent_at: float, *, at_once: bool
    ) -> None:
        assert subscribers.stdin is not None
        self._sent[request_id] = (tenant, sent_at)
        subscribers.stdin.write(f"{request_id} {int(at_once)}\n")
        subscribers.stdin.flush()

    def _sample(self, pids: dict[str, int], seconds: float) -> None:
        client = self._service.client
        try:
            memory = {name: round(resident_mib(pid), 1) for name, pid in pids.items()}
        except (OSError, ProcessLookupError):
            return  # the subscribers have just ended
        data = round(client.info("memory")["used_memory"] / 2**20, 1)
        self.report.samples.append(
            Sample(
                round(seconds, 1),
                **memory,
                redis_data=data,
                keys=client.dbsize(),
                queued=self._service.queued(),
                listening=client.info("clients")["blocked_clients"],
            )
        )

    def _read_account(self) -> None:
        account: dict[str, Any] = json.loads(self._account_file.read_text())
        missing = self._sent.keys() - account.keys()
        if missing:
            self.report.problems.append(f"{len(missing)} requests were not followed to their end")
        times: dict[str, tuple[list[float], list[float]]] = {"heavy": ([], []), "light": ([], [])}
        for request_id, (started, first, _, tokens, error) in account.items():
            tenant, sent_at = self._sent[request_id]
            self.report.chunks += tokens
            if error is not None or tokens != self._plan.tokens:
                self.report.problems.append(f"{request_id}: {tokens} tokens, error {error}")
                continue
            times[tenant][0].append(started - sent_at)
            times[tenant][1].append(first - sent_at)
        for tenant, (waits, first_tokens) in times.items():
            self.report.waits[tenant] = {
                "wait_p50": percentile(waits, 50),
                "wait_p99": percentile(waits, 99),
                "ttft_p50": percentile(first_tokens, 50),
                "ttft_p99": percentile(first_tokens, 99),
            }

    def _forget_requests(self) -> None:
        """Delete the streams and results of the first requests, and count the keys that stay."""
        self._service.wait_settled()
        for key in self._transient():
            self._service.client.delete(key)
        self.report.keys_before = self._lasting_keys()

    def _transient(self) -> list[bytes]:
        """Return the keys of streams and results."""
        client = self._service.client
        patterns = ("headrace:stream:*", "celery-task-meta-*")
        return [key for pattern in patterns for key in client.scan_iter(pattern, 5000)]

    def _lasting_keys(self) -> set[str]:
        """Return the keys that live longer than some seconds, except those that expire an hour after a stream."""
        client, of_ended = self._service.client, (b"headrace:ended:", b"headrace:tenant-requests:")
        keys = [key for key in client.scan_iter(count=5000) if not key.startswith(of_ended)]
        left = {key.decode(): client.pttl(key) for key in keys}  # -1 without an end, -2 after it
        return {key for key, milliseconds in left.items() if milliseconds == -1 or milliseconds >= _BRIEF_MILLISECONDS}

    def _check_keys(self) -> None:
        """Check that all streams and results expire, and count the keys that stay."""
        self._service.wait_settled()
        client = self._service.client
        left = 0
        for key in self._transient():
            seconds = client.ttl(key)  # -1 if it has no expiry, -2 if it has just expired
            left += seconds == -1 or seconds > self._plan.ttl_seconds
            client.delete(key)
        if left:
            self.report.problems.append(f"{left} streams and results stay longer than {self._plan.ttl_seconds} seconds")
        self.report.keys_after = self._lasting_keys()

    def _judge(self) -> None:
        report = self.report
        if len(report.keys_after) > len(report.keys_before):
            new = sorted(report.keys_after - report.keys_before)
            report.problems.append(f"{len(report.keys_after) - len(report.keys_before)} more keys than before: {new}")
        if report.seconds > 120:  # in a shorter run most of the growth is memory that is allocated once
            report.problems += [
                f"memory of {name} grows by {report.growth(name):.2f} MiB a minute, more than {GROWTH_MIB_A_MINUTE:g}"
                for name in ("worker", "engine", "subscribers", "redis_data")
                if report.growth(name) > GROWTH_MIB_A_MINUTE
            ]


def _lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _most_files() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft, min(hard, 8192)) if hard != resource.RLIM_INFINITY else max(soft, 8192)
