"""Send batches of hostile messages to a running service, and check the outcome of each message."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from headrace_broker.content import loads_stored
from headrace_broker.keys import ended_key, result_key, stream_key
from headrace_broker.queue.dead_letters import DeadLetter
from hostile.messages import HONEST_TOKENS, SECRET, Generator, Hostile
from service.workers.service import QUEUE, Service, StreamLog

DEAD = f"headrace:dead:{QUEUE}"
RESULT_SECONDS = 20.0
STAYING = (b"_kombu.binding", b"headrace:share:", b"headrace:models", b"headrace:lease:deliveries")
"""Prefixes of keys that stay, one key for each queue and its priorities."""
MAX_STAYING = 40


@dataclass
class Memory:
    """MiB, while no message is in flight."""

    worker: float
    engine: float
    redis: float


@dataclass
class Account:
    """The outcomes of the messages; `problems` has a sentence for each broken promise."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """Kind -> outcome -> count."""
    memory: list[Memory] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, kind: str, outcome: str) -> None:
        self.outcomes.setdefault(kind, Counter())[outcome] += 1

    def to_json(self) -> dict[str, Any]:
        return {
            "outcomes": {kind: dict(counter) for kind, counter in self.outcomes.items()},
            "memory": [asdict(memory) for memory in self.memory],
            "problems": self.problems,
        }

    @property
    def total(self) -> int:
        return sum(sum(counter.values()) for counter in self.outcomes.values())

    def growth(self, warm_up: int) -> Memory:
        """Return the MiB by which the highest batch after the warm-up exceeds the last batch of the warm-up."""
        first, rest = self.memory[warm_up - 1], self.memory[warm_up:]
        return Memory(
            *(
                round(max([getattr(m, name) for m in rest], default=0) - getattr(first, name), 1)
                for name in ("worker", "engine", "redis")
            )
        )


class Harness:
    """Args:
    service: has one worker that is ready, and no messages.
    without: kinds of messages to leave out.
    """

    def __init__(self, service: Service, seed: int, without: Sequence[str] = ()) -> None:
        self._service = service
        self._client = service.client
        self._worker = service.workers[0]
        self._engine_pid = self._worker.engine_pid()
        self._generator = Generator(seed, without)
        self._at_rest = self._keys()
        self.account = Account()

    def run_batch(self, count: int, settle_seconds: float = 300.0) -> None:
        """Push `count` messages, wait until none is queued or leased, and check the outcome of each."""
        batch = self._generator.take(count)
        with self._client.pipeline(transaction=False) as pipeline:
            for hostile in batch:
                pipeline.lpush(hostile.list_name, hostile.raw)
            pipeline.execute()
        service = self._service
        service.wait_until(lambda: not self._alive() or service.queued() + service.leased() == 0, settle_seconds)
        if not self._alive():
            return
        self._check(batch)
        self._check_at_rest()
        self.account.memory.append(self._memory())

    def finish(self) -> None:
        """Check that the worker holds no request any more, and that its log has no text of a message."""
        for command in ("reserved", "active"):
            if held := self._service.inspected(command):
                self._problem(f"Celery still holds {len(held)} {command} requests")
        text = self._worker.log_text()
        if SECRET in text:
            line = next(line for line in text.splitlines() if SECRET in line)
            self.account.problems.append(f"text of a message is in the log: {line[:300]}")

    def _alive(self) -> bool:
        """Return whether the worker and its engine are the same processes as before."""
        if self._worker.process.poll() is not None:
            self._problem(f"the worker ended with {self._worker.process.returncode}")
            return False
        if self._engine_pid not in self._worker.processes():
            self._problem(f"the engine process {self._engine_pid} is gone")
            return False
        return True

    def _problem(self, sentence: str) -> None:
        if sentence not in self.account.problems:
            self.account.problems.append(sentence)

    def _check(self, batch: Sequence[Hostile]) -> None:
        letters = Counter[bytes]()
        reasons: dict[bytes, str] = {}
        for packed in self._client.lrange(DEAD, 0, -1):
            letter = msgpack.unpackb(packed, raw=True)
            letters[letter[b"body"]] += 1
            reasons[letter[b"body"]] = letter[b"reason"].decode()
        for hostile in batch:
            outcome = self._outcome(hostile, letters, reasons)
            self.account.add(hostile.kind, outcome)
            if outcome.startswith("lost") or (hostile.honest and outcome != "served"):
                self._problem(f"{hostile.kind}: {outcome}: {hostile.raw[:300]!r} ...")
        self._client.delete(DEAD)
        for hostile in batch:
            request_id = id_of(hostile.raw)
            if request_id is not None:
                self._client.delete(stream_key(request_id), result_key(request_id), ended_key(request_id))

    def _outcome(self, hostile: Hostile, letters: Counter[bytes], reasons: dict[bytes, str]) -> str:
        is_dead = letters[hostile.raw] > 0
        if is_dead:
            letters[hostile.raw] -= 1
            if not reasons[hostile.raw]:
                return "lost: a dead letter without a reason"
        request_id = id_of(hostile.raw)
        if request_id is None:
            return "dead letter" if is_dead else "lost: no dead letter, and no id"
        if self._client.type(stream_key(request_id)) != b"stream":
            return "dead letter" if is_dead else "lost: no dead letter, and no stream"
        try:
            log = self._service.stream(request_id)
        except AssertionError as error:
            return f"lost: an invalid stream: {error}"
        return self._answer(request_id, log, hostile)

    def _answer(self, request_id: str, log: StreamLog, hostile: Hostile) -> str:
        if log.end is None:
            return "lost: a stream without an end"
        if hostile.ignores_result:
            return "ended, no result wanted"
        # the result comes shortly after the end of the stream
        deadline = time.monotonic() + RESULT_SECONDS
        while (packed := self._client.get(result_key(request_id))) is None:
            if time.monotonic() > deadline:
                return f"lost: an end, {log.end}, but no result"
            time.sleep(0.02)
        stored: dict[str, Any] = loads_stored(packed)
        if stored["status"] == "REVOKED":
            return "revoked"
        if stored["status"] == "FAILURE" and log.end["error"] is not None:
            return "failure"  # Celery's own, for an unknown task
        if stored["status"] != "SUCCESS":
            return f"lost: its result is {stored['status']}"
        error = stored["result"]["error"]
        if error != log.end["error"]:
            return f"lost: result {error} and stream {log.end['error']} disagree"
        if error is not None:
            return str(error["code"])
        if hostile.honest and (log.num_tokens != HONEST_TOKENS or log.attempts != [1]):
            return f"lost: {log.num_tokens} tokens in attempts {log.attempts}"
        return "served"

    def _keys(self) -> set[bytes]:
        return {key for key in self._client.scan_iter(count=1000) if not key.startswith(STAYING)}

    def _check_at_rest(self) -> None:
        """Check that the messages left no keys in Redis, and delete those that expire."""
        left = self._keys() - self._at_rest
        staying = [key for key in left if self._client.ttl(key) == -1]
        if staying:
            self._problem(f"keys are left without an expiry: {sorted(staying)[:5]}")
        if left:
            self._client.delete(*left)
        if self._client.dbsize() > MAX_STAYING + len(self._at_rest):
            self._problem(f"{self._client.dbsize()} keys stay, more than {MAX_STAYING}")
        if self._client.hlen(f"headrace:lease:deliveries:{QUEUE}"):
            self._problem("counts of deliveries are left")

    def _memory(self) -> Memory:
        return Memory(
            resident_mib(self._worker.process.pid),
            resident_mib(self._engine_pid),
            round(self._client.info("memory")["used_memory"] / 2**20, 1),
        )


def id_of(raw: bytes) -> str | None:
    """Return the request id of a message, or None if it has no valid one."""
    return DeadLetter("", "", 0, raw).request_id


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise ValueError(f"process {pid} has no memory")
