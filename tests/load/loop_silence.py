"""For how long hostile but valid requests keep a worker's event loop from its leases, streams and probes.

    cd tests && python -m load.loop_silence [case ...] [--model FOLDER] [--workers N]

Runs a real worker on a real server. For each case it prints the longest turn of the loop, the number of lost leases,
the slowest answer of /health/live, and the latency of small requests of another tenant. `PROBE` measures each turn in
the worker: its length, and the processor time of the loop's thread. In the rest of a turn the thread waits for Redis or
for a processor.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack

from service.servers import make_server
from service.workers.service import QUEUE, Service
from service.workers.worker_process import WorkerProcess

PROBE = """
import os, time
from kombu.asynchronous import hub
real_poll = hub.poll
turns = open(os.environ["LOOP_SILENCE_FILE"], "a", buffering=1)
class Probe:
    def __init__(self, poller): self.poller, self.began, self.worked = poller, None, 0.0
    def poll(self, timeout):
        now, worked = time.monotonic(), time.thread_time()
        if self.began is not None and now - self.began > 0.01:
            print(now - self.began, worked - self.worked, file=turns)
        events = self.poller.poll(timeout)
        self.began, self.worked = time.monotonic(), time.thread_time()
        return events
    def __getattr__(self, name): return getattr(self.poller, name)
hub.poll = lambda: Probe(real_poll())
from headrace_cli.main import main
main()
"""
PATIENCE = 180.0


def params(**more: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "temperature": 0.0, **more}


def grammars() -> Iterator[Any]:
    for k in range(64):
        yield {
            "prompt": "n",
            "sampling_params": params(
                structured_outputs={"json": json.dumps({"type": "integer", "multipleOf": 999983 - 2 * k})}
            ),
        }


def deep_schemas() -> Iterator[Any]:
    for k in range(32):
        schema: dict[str, Any] = {"type": "string", "maxLength": k + 1}
        for _ in range(60):
            schema = {"type": "object", "properties": {"a": schema, "b": schema}, "required": ["a"]}
            if len(json.dumps(schema)) > 30_000:
                break
        yield {"prompt": "n", "sampling_params": params(structured_outputs={"json": json.dumps(schema)})}


def long_prompts() -> Iterator[Any]:
    for k in range(20):
        yield {"prompt": f"{k} " + "the wheel turns " * 40_000, "sampling_params": params()}


def runs_of_one_letter() -> Iterator[Any]:
    for k in range(20):
        yield {"prompt": f"{k} " + "a" * 640_000, "sampling_params": params()}


def long_chats() -> Iterator[Any]:
    for _ in range(16):
        messages = [{"role": ("user", "assistant")[n % 2], "content": f"turn {n} " * 40} for n in range(4095)]
        yield {"messages": messages, "sampling_params": params()}


def many_words() -> Iterator[Any]:
    for k in range(64):
        words = [f"{k} {n} " + "word " * 49 for n in range(256)]
        yield {"prompt": "n", "sampling_params": params(bad_words=words, stop=[w[:200] for w in words[:16]])}


def token_ids() -> Iterator[Any]:
    for k in range(20):
        yield {"prompt_token_ids": [k] * (2**20), "sampling_params": params()}


def biases() -> Iterator[Any]:
    for k in range(32):
        bias = {str(token): (k + token) % 7 - 3 for token in range(1024)}
        yield {"prompt": "n", "sampling_params": params(logit_bias=bias)}


def allowed() -> Iterator[Any]:
    for _ in range(16):
        yield {"prompt": "n", "sampling_params": params(allowed_token_ids=[*range(49_000)] * 5)}


def many_choices() -> Iterator[Any]:
    for k in range(2):
        yield {"prompt": f"{k} " + "wheel " * 2_000, "sampling_params": {**params(temperature=1.0), "n": 64}}


def nested_bodies() -> Iterator[Any]:
    for _ in range(8):
        yield {"prompt": "n", "x": [{"a": {}}] * 1_500_000}


def ordinary() -> Iterator[Any]:
    for k in range(128):
        yield {"prompt": f"request {k}", "sampling_params": params(max_tokens=4)}


CASES: dict[str, Callable[[], Iterator[Any]]] = {
    case.__name__: case
    for case in (
        ordinary,
        grammars,
        deep_schemas,
        long_prompts,
        runs_of_one_letter,
        long_chats,
        many_words,
        token_ids,
        biases,
        allowed,
        many_choices,
        nested_bodies,
    )
}


class Probes:
    """Call /health/live and send small requests of another tenant, while the context is entered."""

    def __init__(self, service: Service, workers: list[WorkerProcess]) -> None:
        self._service = service
        self._urls = [worker.url for worker in workers]
        self._stopped = threading.Event()
        self.worst_health = 0.0
        self.statuses: set[int] = set()
        self.latencies: list[float] = []
        self._threads = [threading.Thread(target=work) for work in (self._ask_health, self._send_small)]

    def __enter__(self) -> "Probes":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _ask_health(self) -> None:
        while not self._stopped.wait(0.1):
            for url in self._urls:
                began = time.monotonic()
                try:
                    with urllib.request.urlopen(f"{url}/health/live", timeout=30) as response:
                        self.statuses.add(response.status)
                except urllib.error.HTTPError as error:
                    self.statuses.add(error.code)
                self.worst_health = max(self.worst_health, time.monotonic() - began)

    def _send_small(self) -> None:
        while not self._stopped.wait(0.3):
            began = time.monotonic()
            request_id = send(self._service, {"prompt": "small", "sampling_params": params()}, "small")
            while not ended(self._service, request_id) and not self._stopped.is_set():
                time.sleep(0.005)
            self.latencies.append(time.monotonic() - began)


def send(service: Service, kwargs: Any, tenant: str) -> str:
    request_id = uuid.uuid4().hex
    service.app.send_task(
        "headrace.generate", kwargs=kwargs, queue=QUEUE, task_id=request_id, headers={"tenant": tenant}
    )
    return request_id


def ended(service: Service, request_id: str) -> bool:
    last = service.client.xrevrange(f"headrace:stream:{request_id}", count=1)
    return bool(last) and last[0][1][b"type"] == b"end"


def measure(service: Service, workers: list[WorkerProcess], turns: list[Path], requests: list[Any]) -> dict[str, Any]:
    lost = sum(worker.metrics().get("headrace_leases_lost_total", 0) for worker in workers)
    before = [len(path.read_text().splitlines()) for path in turns]
    began = time.monotonic()
    with Probes(service, workers) as probes:
        waiting = {send(service, kwargs, "heavy") for kwargs in requests}
        codes: dict[str, int] = {}
        while waiting and time.monotonic() - began < PATIENCE:
            time.sleep(0.1)
            for request_id in [request_id for request_id in waiting if ended(service, request_id)]:
                waiting.discard(request_id)
                data = msgpack.unpackb(
                    service.client.xrevrange(f"headrace:stream:{request_id}", count=1)[0][1][b"data"]
                )
                code = (data["error"] or {"code": "served"})["code"]
                codes[code] = codes.get(code, 0) + 1
    measured = [
        tuple(map(float, line.split()))
        for path, count in zip(turns, before, strict=True)
        for line in path.read_text().splitlines()[count:]
    ]
    silences, work = zip(*measured, strict=True) if measured else ((0.0,), (0.0,))
    latencies = sorted(probes.latencies) or [0.0]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "longest_silence_ms": round(1000 * max(silences)),
        "longest_work_ms": round(1000 * max(work)),
        "silences_over_50_ms": sum(silence > 0.05 for silence in silences),
        "leases_lost": sum(worker.metrics().get("headrace_leases_lost_total", 0) for worker in workers) - lost,
        "health": sorted(probes.statuses),
        "small_median_s": round(latencies[len(latencies) // 2], 2),
        "small_worst_s": round(latencies[-1], 2),
        "answers": codes,
        "unanswered": len(waiting),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--workers", type=int, default=1)
    chosen = parser.parse_args()
    with make_server() as server, tempfile.TemporaryDirectory() as folder:
        service = Service(server, chosen.model, Path(folder))
        turns = [Path(folder) / f"turns-{number}" for number in range(chosen.workers)]
        try:
            workers = []
            for path in turns:
                path.touch()
                workers.append(
                    service.start_worker(
                        command=[sys.executable, "-c", PROBE, "worker"],
                        environ={"LOOP_SILENCE_FILE": str(path)},
                        max_num_seqs=64,
                        kv_cache_memory="1GiB",
                        dtype="bfloat16",
                    )
                )
            for worker in workers:
                worker.wait_ready(600)
            service.wait_ended([send(service, {"prompt": "warm", "sampling_params": params()}, "small")])
            for name in chosen.cases or CASES:
                found = measure(service, workers, turns, list(CASES[name]()))
                sys.stdout.write(json.dumps({"case": name, **found}) + "\n")
                sys.stdout.flush()
        finally:
            service.close()


if __name__ == "__main__":
    main()
