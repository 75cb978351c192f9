"""`Service`: a server, its workers, and a producer and subscriber that use only the wire contract."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import redis
from celery import Celery
from celery.result import AsyncResult

from headrace_broker.server.embedded import EmbeddedServer
from service.workers.worker_process import WorkerProcess

QUEUE = "headrace.tiny"
DEADLINE = 150.0  # only a failure waits so long; a slow machine may need much of it


@dataclass
class ChoiceStream:
    """One choice as a subscriber reads it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class StreamLog:
    """A whole stream, checked against the wire contract while it is read."""

    attempts: list[int]
    choices: dict[int, ChoiceStream]
    num_tokens: int
    end: dict[str, Any] | None
    prompt_logprobs: list[Any] | None = None
    workers: list[str] = field(default_factory=list)
    """The name of each attempt's worker."""

    @classmethod
    def read(cls, client: "redis.Redis", request_id: str) -> "StreamLog":
        log = cls([], {}, 0, None)
        last = (0, -1)
        for raw_id, fields in client.xrange(f"headrace:stream:{request_id}"):
            attempt, offset = map(int, raw_id.decode().split("-"))
            assert (attempt, offset) > last, f"{raw_id!r} after {last}"
            last = (attempt, offset)
            assert log.end is None, "an entry after the end"
            log._take(fields[b"type"], msgpack.unpackb(fields[b"data"]), attempt, offset)
        return log

    def _take(self, kind: bytes, data: dict[str, Any], attempt: int, offset: int) -> None:
        if kind == b"start":
            assert offset == 0
            assert attempt not in self.attempts
            self.attempts.append(attempt)
            self.workers.append(data["worker"])
        elif kind == b"chunk":
            assert attempt == self.attempts[-1]
            self.num_tokens += len(data["token_ids"])
            assert offset == self.num_tokens, f"offset {offset} of an entry, {self.num_tokens} tokens so far"
            choice = self.choices.setdefault(data["index"], ChoiceStream())
            assert choice.finish_reason is None, "a chunk after the last of its choice"
            choice.token_ids += data["token_ids"]
            choice.text += data["text"]
            if data.get("prompt_logprobs") is not None:
                assert self.prompt_logprobs is None, "prompt log-probabilities came twice"
                self.prompt_logprobs = data["prompt_logprobs"]
            choice.logprobs += data["logprobs"] or []
            choice.finish_reason, choice.stop_reason = data.get("finish_reason"), data.get("stop_reason")
        else:
            assert kind == b"end"
            assert offset == self.num_tokens + 1
            self.end = data

    @property
    def content(self) -> dict[int, ChoiceStream]:
        """The generated choices, for comparison with another run."""
        return dict(sorted(self.choices.items()))


class Service:
    """Sends by plain Celery and reads by plain Redis commands.

    Args:
        url: if not the server's own, for instance with a user's name in it.
        sender_url: of the user that sends by Celery, where it is another one.
    """

    def __init__(
        self, server: EmbeddedServer, model: str, folder: Path, *, url: str | None = None, sender_url: str | None = None
    ) -> None:
        self.server = server
        self.url = url or server.url
        self.workers: list[WorkerProcess] = []
        self._num_started = 0
        self._handles: list[AsyncResult] = []
        self.client = redis.Redis.from_url(self.url, socket_timeout=30, protocol=2)
        sender_url = sender_url or self.url
        self.app = Celery("producer", broker=sender_url, backend=sender_url, set_as_current=False)
        self.app.conf.update(
            task_serializer="msgpack", result_serializer="msgpack", accept_content=["msgpack"], result_expires=600
        )
        self._model = model
        self._folder = folder
        self.stream_server_of: Callable[[str], redis.Redis] = lambda _request_id: self.client
        """Returns the server of a request's stream."""

    def start_worker(self, **settings: object) -> WorkerProcess:
        self._num_started += 1
        log = self._folder / f"worker-{self._num_started}.log"
        options: dict[str, Any] = {"model": self._model, "redis_url": self.url, **settings}
        self.workers.append(WorkerProcess(log=log, **options))
        return self.workers[-1]

    def send(self, kwargs: Any = None, *, args: Any = (), **options: Any) -> AsyncResult:
        return self._keep(self.app.send_task("headrace.generate", args=args, kwargs=kwargs, queue=QUEUE, **options))

    def handle(self, request_id: str) -> AsyncResult:
        """Get the handle of a request that `send` did not send."""
        return self._keep(self.app.AsyncResult(request_id))

    def stored(self, request_id: str) -> tuple[bytes, dict[str, Any]]:
        """Wait for the request's result. Returns its raw bytes in Redis and its decoded form."""
        self.wait_until(lambda: self.client.exists(f"celery-task-meta-{request_id}"))
        raw = self.client.get(f"celery-task-meta-{request_id}")
        return raw, json.loads(raw) if raw[:1] == b"{" else msgpack.unpackb(raw)

    def _keep(self, handle: AsyncResult) -> AsyncResult:
        self._handles.append(handle)
        return handle

    def forget(self) -> None:
        """Forget all handles and ended workers; for runs of many rounds."""
        self._handles.clear()
        self.workers = [worker for worker in self.workers if worker.process.poll() is None]

    def generate(self, prompt: str = "the wheel", **params: Any) -> AsyncResult:
        """A greedy request of exactly `max_tokens` tokens, unless told otherwise."""
        params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params}
        return self.send({"prompt": prompt, "sampling_params": params})

    def inspected(self, command: str, **arguments: Any) -> Any:
        """What one worker answers to a remote control command of Celery's."""
        [reply] = self.app.control.broadcast(command, arguments=arguments, reply=True, timeout=60, limit=1)
        [answer] = reply.values()
        return answer

    def stream(self, request_id: str) -> StreamLog:
        return StreamLog.read(self.stream_server_of(request_id), request_id)

    def wait_ended(self, request_ids: Iterable[str], timeout: float = DEADLINE) -> dict[str, StreamLog]:
        """Wait until every stream has its end entry, and return the streams."""
        logs = {}
        deadline = time.monotonic() + timeout
        for request_id in request_ids:
            self._follow(request_id, deadline, lambda log: log.end is not None)
            logs[request_id] = self.stream(request_id)
        return logs

    def wait_tokens(self, request_ids: Iterable[str], at_least: int, timeout: float = DEADLINE) -> None:
        """Wait until every stream holds so many tokens."""
        deadline = time.monotonic() + timeout
        for request_id in request_ids:
            self._follow(request_id, deadline, lambda log: log.num_tokens >= at_least)

    def _follow(self, request_id: str, deadline: float, done: Any) -> None:
        last = "0-0"
        while not done(self.stream(request_id)):
            assert time.monotonic() < deadline, f"{request_id} has come to {self.stream(request_id)}\n{self.logs()}"
            server = self.stream_server_of(request_id)
            reply = server.xread({f"headrace:stream:{request_id}": last}, block=500)
            if reply:
                last = reply[0][1][-1][0]

    def logs(self) -> str:
        return "\n".join(f"--- {worker.log.name}\n{worker.log_text()[-3000:]}" for worker in self.workers)

    def queued(self) -> int:
        lists = (QUEUE, *(f"{QUEUE}\x06\x16{step}" for step in (3, 6, 9)))
        unsorted = (*lists, *(f"headrace:queue:arrived:{name}" for name in lists))
        return sum(map(self.client.llen, unsorted)) + sum(
            self.client.zcard(f"headrace:queue:ids:{name}") for name in lists
        )

    def wait_settled(self, timeout: float = 60.0) -> None:
        """Wait until nothing is queued or leased any more; acknowledgements come shortly after the results."""
        kept = [f"headrace:lease:{name}:{QUEUE}" for name in ("body", "meta", "deliveries")]
        self.wait_until(
            lambda: self.queued() == self.leased() == 0 and not any(self.client.hlen(key) for key in kept), timeout
        )

    def leased(self) -> int:
        return int(self.client.zcard(f"headrace:lease:leases:{QUEUE}"))

    def wait_until(self, condition: Any, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"it did not come true\n{self.logs()}"
            time.sleep(0.01)

    def cut_connections(self, worker: WorkerProcess) -> None:
        """Cut every connection to the server, and wait until `worker` answers control messages again.

        This cuts this process's connections too, so the next command needs one that is not from kombu's pool.
        """
        lost = worker.log_text().count("Connection to broker lost")
        self.client.client_kill_filter(_type="normal", skipme=True)
        worker.wait_for_log("Connection to broker lost", count=lost + 1)
        with self.app.connection_for_write() as connection:
            self.wait_until(lambda: self.app.control.ping(timeout=2, limit=1, connection=connection))

    def dead_letters(self) -> list[dict[bytes, Any]]:
        return [msgpack.unpackb(letter, raw=True) for letter in self.client.lrange(f"headrace:dead:{QUEUE}", 0, -1)]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for handle in self._handles:  # otherwise each would connect to the stopped server when it is collected
            handle.backend = None
        self.app.close()
        self.client.close()


def results(handles: Sequence[AsyncResult], timeout: float = DEADLINE) -> dict[str, dict[str, Any]]:
    """Get the results with Celery's own client, by request id."""
    return {handle.id: handle.get(timeout=timeout) for handle in handles}


def assert_result_is_stream(result: dict[str, Any], log: StreamLog) -> None:
    """Assert that the stored result equals the stream."""
    assert [output["index"] for output in result["outputs"]] == sorted(log.choices)
    assert result["prompt_logprobs"] == log.prompt_logprobs
    for output in result["outputs"]:
        choice = log.choices[output["index"]]
        assert output["token_ids"] == choice.token_ids
        assert output["text"] == choice.text
        assert (output["logprobs"] or []) == choice.logprobs
        assert output["finish_reason"] == choice.finish_reason
        assert output["stop_reason"] == choice.stop_reason
    assert log.end is not None
    assert result["usage"] == log.end["usage"]
    assert result["error"] == log.end["error"]
    assert result["usage"]["completion_tokens"] == log.num_tokens
