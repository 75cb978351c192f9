"""Fakes of the worker's environment: event loop, engine process, tokenizer, Celery's requests, Redis."""

from __future__ import annotations

import itertools
import os
import select
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, ClassVar

import msgpack
import redis
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from headrace_broker.keys import LOADING_KEY, PROBE_KEY
from headrace_broker.messages import TASK_NAME
from headrace_broker.queue.worker_port import DeliveryInfo
from headrace_broker.results import Usage
from headrace_broker.scripts import script
from headrace_broker.streams.grant import Grant
from headrace_engine.core.outputs import STEP_STATS, EngineCoreOutput, EngineCoreOutputs, StepStats
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.text.token_pieces import TokenPieces
from headrace_engine.text.tokenizer_parts import TokenizerParts
from headrace_wire.codes import DeadLetterReason
from unit.engine.letters import load_tokenizer

MODEL = ModelInfo(
    vocab_size=100,
    max_model_len=64,
    eos_token_ids=[2],
    architecture="FakeForCausalLM",
    dtype="float32",
    device="cpu",
    attention="fake",
    num_parameters=0,
)

CAPABILITIES = EngineCapabilities.of_everything(draws="fake-1", stats=STEP_STATS)


class FakeTokenizer:
    """Makes one token of each letter."""

    eos_token_id = None
    has_chat_template = True
    start_ids: ClassVar[list[int]] = []

    def __init__(self) -> None:
        vocabulary = {chr(ord("a") + number): 10 + number for number in range(26)}
        self.backend = Tokenizer(WordLevel({"?": 0, **vocabulary}, unk_token="?"))
        self.backend.decoder = Fuse()  # type: ignore[assignment]

    def encode(self, text: str) -> list[int]:
        return [10 + ord(letter) - ord("a") for letter in text]

    @cached_property
    def pieces(self) -> TokenPieces:
        return TokenPieces(self.backend)


class FakeTimer:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeHub:
    """The part of kombu's hub that the worker uses, on a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[FakeTimer] = []
        self.readers: dict[int, Callable[[], None]] = {}
        self.soon: list[Callable[[], None]] = []
        self.poller: Any = None

    def call_later(self, delay: float, callback: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(self.now + delay, callback))
        return self.timers[-1]

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        self.readers[fd] = callback

    def remove(self, fd: int) -> None:
        self.readers.pop(fd, None)

    def pending(self) -> list[float]:
        """Seconds until each timer is due."""
        return [timer.at - self.now for timer in self.timers if not timer.cancelled]

    def advance(self) -> None:
        """Set the clock to the next timer and run it."""
        timer = min((timer for timer in self.timers if not timer.cancelled), key=lambda timer: timer.at)
        self.timers.remove(timer)
        self.now = timer.at
        timer.callback()

    def run_soon(self) -> None:
        while self.soon:
            self.soon.pop(0)()


class FakeProcess:
    """An engine process. The supervisor receives what the test appends to `outbox`."""

    numbers = itertools.count(1)

    def __init__(self) -> None:
        self.number = next(self.numbers)
        self.pid = 1000 + self.number
        self.is_ready = False
        self.load_progress = 0.0
        self.model_info = MODEL
        self.capabilities = CAPABILITIES
        self.outbox: list[EngineCoreOutputs | Exception] = []
        self.requests: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.asked: list[str] = []
        self.answer: Future[Any] = Future()
        self.answer.set_result(asdict(load_tokenizer(self)))
        self.send_error: Exception | None = None
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        return self._reader

    def speak(self) -> None:
        """Make the process readable until it is read."""
        os.write(self._writer, b"x")

    def receive(self) -> list[EngineCoreOutputs]:
        if select.select([self._reader], [], [], 0)[0]:
            os.read(self._reader, 1)
        steps: list[EngineCoreOutputs] = []
        while self.outbox:
            received = self.outbox.pop(0)
            if isinstance(received, Exception):
                raise received
            steps.append(received)
        return steps

    def call(self, method: str) -> Future[Any]:
        self.asked.append(method)
        return self.answer

    def add_request(self, request: EngineCoreRequest) -> None:
        if self.send_error:
            raise self.send_error
        self.requests.append(request)

    def abort_requests(self, request_ids: Any) -> None:
        if self.send_error:
            raise self.send_error
        self.aborted += request_ids

    def shutdown(self, timeout: float) -> None:
        self.calls.append("shutdown")

    def kill(self) -> None:
        self.calls.append("kill")

    def close(self) -> None:
        self.calls.append("close")
        os.close(self._writer)
        os.close(self._reader)


def step(*outputs: EngineCoreOutput, waiting: int = 0) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=list(outputs), stats=StepStats(num_tokens=len(outputs), waiting=waiting))


class FakeSupervisor:
    """The engine's supervisor for a dispatcher."""

    def __init__(self) -> None:
        self.is_ready = True
        self.tokenizer = FakeTokenizer()
        self.tokenizer_parts = TokenizerParts(tokenizer_json=b"", special_tokens={})
        self.pid = 4711
        self.sent: list[EngineCoreRequest] = []
        self.ended: set[str] = set()
        self.aborted: list[str] = []
        self.send_error: Exception | None = None
        self.has_work = False
        self.num_death_resets = 0
        self.failures: list[Exception] = []

    def send(self, requests: Any) -> None:
        if self.send_error:
            raise self.send_error
        self.sent += requests

    def abort(self, request_ids: Any) -> None:
        self.aborted += request_ids

    def check_progress(self, *, has_work: bool) -> None:
        self.has_work = has_work

    def reset_deaths(self) -> None:
        self.num_death_resets += 1

    def fail(self, error: Exception) -> None:
        self.failures.append(error)


class FakeCeleryRequest:
    """A received message that records what the worker does with it."""

    def __init__(
        self,
        request_id: str = "r1",
        kwargs: Any = None,
        *,
        lease_id: str = "l1",
        content: str = "content",
        **headers: Any,
    ) -> None:
        self.id = request_id
        self.task_name: str = headers.pop("task_name", TASK_NAME)
        kwargs = kwargs if kwargs is not None else {"prompt": "abc", "sampling_params": {"max_tokens": 4}}
        self.body: bytes = msgpack.packb([[], kwargs, {}])
        self.content_type, self.content_encoding = "application/x-msgpack", "binary"
        self.request_dict = headers
        self.delivery_info = {"priority": headers.pop("priority", 0), "redelivered": headers.pop("redelivered", False)}
        self.expires = headers.pop("expires", None)
        self.time_limits = headers.pop("time_limits", (None, None))
        self.due = headers.pop("due", None)
        self.lease_id = lease_id
        self.is_revoked = False
        self.fate: list[str] = []
        self.regrants: list[Grant | None] = []
        """What the queue answers when the worker asks for a higher grant."""
        self.results: dict[str, dict[str, Any]] = {}
        self.dead_letter_reason: str | None = None
        self.tokens: int | None = None
        known = ("queued_at", "step", "over_quota", "preemptions", "choices", "grant")
        self.delivery = DeliveryInfo(content, **{name: headers.pop(name) for name in known if name in headers})

    def revoked(self) -> bool:
        if self.is_revoked:
            self.fate.append("revoked in the queue")
        return self.is_revoked

    def regrant(self, at_least: int) -> Grant | None:
        self.fate.append(f"asked for a grant above {at_least}")
        return self.regrants.pop(0)

    def announce_terminated_in_queue(self) -> None:
        self.fate.append("terminated in the queue")

    def on_accepted(self, pid: int, at: float) -> None:
        self.fate.append("accepted")

    def acknowledge(self) -> None:
        self.fate.append("acknowledged")

    def finish(self, result: dict[str, Any]) -> None:
        self.results[self.id] = result

    def finish_as_dead_letter(self, reason: DeadLetterReason, detail: str) -> None:
        self.dead_letter_reason = reason.saying(detail)

    def requeue(self, *, is_counted: bool = False, is_preempted: bool = False, choices: int | None = None) -> None:
        assert not (is_counted and is_preempted)
        self.delivery = replace(self.delivery, choices=choices or self.delivery.choices)
        self.fate.append("preempted" if is_preempted else "requeued, counted" if is_counted else "requeued")

    def postpone(self, seconds: float, *, keeps_place: bool = False) -> None:
        self.fate.append(f"postponed by {seconds:.0f} s" + (" at its place" if keeps_place else ""))

    def dead_letter(self, reason: DeadLetterReason, _detail: str = "") -> None:
        self.fate.append("rejected as duplicate" if reason is DeadLetterReason.DUPLICATE_ID else "rejected")

    def let_go(self) -> None:
        self.fate.append("let go")

    def cost(self, usage: Usage | None) -> None:
        self.tokens = 0 if usage is None else usage.prompt_tokens + usage.completion_tokens

    def on_success(self, outcome: tuple[bool, Any, float]) -> None:
        self.fate.append("announced")

    def announce_terminated(self) -> None:
        self.fate.append("revoked")


class FakePipeline:
    """Runs each command at once."""

    def __init__(self, client: FakeRedis) -> None:
        self._client = client
        self._replies: list[Any] = []

    def __len__(self) -> int:
        return len(self._replies)

    def __enter__(self) -> FakePipeline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set(self, key: str, value: Any, ex: int, nx: bool = False) -> None:
        self._client.check()
        if not (nx and key in self._client.values):
            self._client.values[key] = value
            self._client.milliseconds_left[key] = 1000 * ex
        self._replies.append(True)

    def eval(self, text: str, _num_keys: int, *keys: str) -> None:
        assert text == script("listeners_forget").text
        for listener, ended in zip(keys[::2], keys[1::2], strict=True):
            entries = self._client.entries(ended.removeprefix("headrace:ended:"))
            if entries and entries[-1][2] == "end":
                self._client.delete(listener)
        self._replies.append(None)

    def hset(self, key: str, field: str, value: bytes) -> None:
        self._client.check()
        assert key == LOADING_KEY
        self._client.loading[field.encode()] = value
        self._replies.append(1)

    def expire(self, key: str, seconds: int) -> None:
        self._client.expire(key, seconds)
        self._replies.append(1)

    def pttl(self, key: str) -> None:
        self._client.check()
        self._replies.append(self._client.milliseconds_left[key])

    def execute(self) -> list[Any]:
        self._client.check()
        return self._replies


class FakeScript:
    """A script of a `FakeRedis`; its text stands for its hash."""

    def __init__(self, redis: FakeRedis, text: str) -> None:
        self._redis = redis
        self.sha = text

    def __call__(self, keys: list[str], args: list[Any]) -> Any:
        return self._redis.run(self.sha, keys, args)


class FakeConnection:
    """Runs a script of a `FakeRedis` when its reply is read."""

    def __init__(self, redis: FakeRedis) -> None:
        self._redis = redis

    def send_command(self, command: str, sha: str, num_keys: int, *args: Any) -> None:
        assert (command, num_keys) == ("EVALSHA", 0)
        self._sent = sha, list(args)

    def disconnect(self) -> None: ...

    def read_response(self) -> Any:
        sha, args = self._sent
        return self._redis.run(sha, [], args)


class FakeRedis:
    """The stream scripts in Python, some plain keys, and an error to raise instead."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.registered: dict[bytes, bytes] = {}
        """Packed models by name."""
        self.loading: dict[bytes, bytes] = {}
        """Packed reports by worker."""
        self.milliseconds_left: dict[str, int] = {}
        self.streams: dict[str, list[tuple[int, int, str, dict[str, Any]]]] = {}
        self.error: Exception | None = None
        self.refuses_all = True
        """Whether all commands raise the error, or only the scripts."""
        self.publishes = 0
        self._scripts = {
            script("stream_prelude", f"stream_{name}").text: getattr(self, f"_{name}")
            for name in ("claim", "publish", "end")
        }

    def register_script(self, text: str) -> FakeScript:
        return FakeScript(self, text)

    @property
    def connection_pool(self) -> FakeRedis:
        return self

    def get_connection(self) -> FakeConnection:
        return FakeConnection(self)

    def release(self, connection: FakeConnection) -> None: ...

    def run(self, text: str, keys: list[str], args: list[Any]) -> Any:
        return self._run(self._scripts[text], keys, args)

    def check(self) -> None:
        if self.error:
            raise self.error

    def hget(self, _key: str, field: str) -> bytes | None:
        return self.registered.get(field.encode())

    def hgetall(self, _key: str) -> dict[bytes, bytes]:
        return {}

    def hset(self, _key: str, field: str, value: bytes) -> None:
        self.check()
        self.registered[field.encode()] = value

    def hdel(self, key: str, field: str) -> None:
        self.check()
        assert key == LOADING_KEY
        self.loading.pop(field.encode(), None)

    def set(self, key: str, value: str, ex: int | None = None, px: int | None = None) -> bool:
        if self.refuses_all or key != PROBE_KEY:
            self.check()
        if ex is not None:
            self.values[key] = value
            self.milliseconds_left[key] = 1000 * ex
        return True

    def xrange(self, key: str) -> list[Any]:
        self.check()
        return [
            (f"{attempt}-{offset}".encode(), {b"type": kind.encode(), b"data": msgpack.packb(data)})
            for attempt, offset, kind, data in self.streams.get(key, [])
        ]

    def expire(self, key: str, seconds: int) -> None:
        self.check()
        self.milliseconds_left[key] = 1000 * seconds

    def exists(self, key: str) -> int:
        self.check()
        return int(key in self.streams)

    def delete(self, key: str) -> None:
        self.check()
        self.values.pop(key, None)

    def pipeline(self, transaction: bool) -> FakePipeline:
        assert not transaction
        return FakePipeline(self)

    def _run(self, script: Callable[..., Any], keys: list[str], args: list[Any]) -> Any:
        self.check()
        for key in keys:
            key.encode()  # as the client does
        return script(keys, args)

    def entries(self, request_id: str) -> list[tuple[int, int, str, dict[str, Any]]]:
        return self.streams.get(f"headrace:stream:{request_id}", [])

    def end(self, request_id: str) -> dict[str, Any]:
        _, _, kind, data = self.entries(request_id)[-1]
        assert kind == "end"
        return data

    def _claim(self, keys: list[str], args: list[Any]) -> Any:
        entries = self.streams.setdefault(keys[0], [])
        raw = [
            [f"{attempt}-{offset}".encode(), [b"type", kind.encode(), b"data", msgpack.packb(data)]]
            for attempt, offset, kind, data in entries
        ]
        self.milliseconds_left[keys[0]] = 1000 * args[1]
        last = entries[-1] if entries else (0, 0, "", {})
        losses = self.values.get(keys[1], 0)
        if entries and self._is_of_another(entries, args[2]):
            return last[0], 2, [], 0, 0
        if last[2] == "end":
            return last[0], 1, raw, losses, 0
        number, owner = args[3] or last[0] + 1, args[4]
        if entries and last[0] >= number:
            is_own = (number, 0, owner) in [(each[0], each[1], each[3].get("owner")) for each in entries]
            return (last[0], 0, raw, losses, 0) if last[0] == number and is_own else (last[0], 3, [], 0, 0)
        entries.append((number, 0, "start", msgpack.unpackb(args[0])))
        return number, 0, raw, losses, 0

    def _is_of_another(self, entries: list[tuple[int, int, str, dict[str, Any]]], content: str) -> bool:
        return entries[0][3].get("content", content) != content

    def _publish(self, keys: list[str], args: list[Any]) -> list[Any]:
        self.publishes += 1
        failed: list[Any] = []
        for position, write in enumerate(msgpack.unpackb(args[1], raw=True)):
            (request_id, entry_id, before, kind), data = (part.decode() for part in write[:4]), write[4]
            attempt, offset = map(int, entry_id.split("-"))
            entries = self.streams.get(f"headrace:stream:{request_id}")
            if entries is None:
                failed += [position, b"gone"]
            elif entries[-1][0] > attempt:
                cancelled = entries[-1][3].get("finish_reason") == "cancelled"
                failed += [position, b"cancelled" if cancelled else b"fenced"]
            elif (attempt, offset) > entries[-1][:2]:
                tokens = max((end for _, end, kind, _ in entries if kind == "chunk"), default=0)
                is_over = entries[-1][2] == "end"
                if attempt > entries[-1][0] or tokens != int(before.partition("-")[2]) or is_over:
                    failed += [position, b"rolled_back"]
                else:
                    entries.append((attempt, offset, kind, msgpack.unpackb(data)))
        return failed

    def _end(self, keys: list[str], args: list[Any]) -> Any:
        entries = self.streams.setdefault(keys[0], [])
        last = entries[-1] if entries else (0, 0, "", {})
        if entries and self._is_of_another(entries, args[3]):
            return b""
        if last[2] == "end":
            return msgpack.packb(last[3])
        tokens = max((offset for _, offset, kind, _ in entries if kind == "chunk"), default=0)
        entries.append((last[0] + 1, tokens + 1, "end", msgpack.unpackb(args[0])))
        return None


OUT_OF_MEMORY = redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
AWAY = redis.ConnectionError("Connection refused")
