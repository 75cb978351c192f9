"""Messages that any producer could push: 33 hostile kinds and one honest kind, all drawn from a seed.

Every text in them contains `SECRET`, which must never be logged.
"""

import base64
import copy
import json
import pickle
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack

from service.workers.messages import EMBED, message
from service.workers.service import QUEUE

SECRET = "Zanzibar"
HONEST_TOKENS = 3
SEPARATOR = "\x06\x16"
_BOMB = zlib.compress(bytes(100 * 2**20), 9)
"""100 KB that decompress to 100 MiB."""

PARAMS = [
    "n",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
    "repetition_detection",
    "structured_outputs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stream_interval",
    "extra_args",
    "output_kind",
]
HEADERS = [
    "lang",
    "task",
    "id",
    "shadow",
    "eta",
    "expires",
    "group",
    "group_index",
    "retries",
    "timelimit",
    "root_id",
    "parent_id",
    "argsrepr",
    "kwargsrepr",
    "origin",
    "ignore_result",
    "replaced_task_nesting",
    "stamped_headers",
    "stamps",
    "compression",
    "tenant",
    "enqueued_at",
    "idempotency_key",
    "traceparent",
    "tracestate",
    "chord",
    "reply_to",
    "max_tokens",
]
PROPERTIES = [
    "correlation_id",
    "reply_to",
    "delivery_mode",
    "delivery_info",
    "priority",
    "body_encoding",
    "delivery_tag",
]


@dataclass(frozen=True)
class Hostile:
    """One message, as it is pushed."""

    kind: str
    raw: bytes
    list_name: str = QUEUE
    honest: bool = False

    @property
    def ignores_result(self) -> bool:
        """Whether the message asks Celery to store no result."""
        try:
            return bool(json.loads(self.raw)["headers"].get("ignore_result"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False


class Generator:
    """Args:
    seed: the same seed gives the same messages.
    without: kinds to leave out.
    """

    def __init__(self, seed: int, without: Sequence[str] = ()) -> None:
        self._draw = random.Random(seed)
        self._now = datetime.now(UTC)
        self._honest_ids: list[str] = []
        self._urgent_honest_ids: list[str] = []
        """Ids of the honest messages that are in the same list as the hostile ones, ahead of later ones."""
        self._last: bytes = b"{}"
        self._kinds: list[tuple[str, Callable[[], bytes | dict[str, Any]]]] = [
            (name[5:], getattr(self, name))
            for name in sorted(dir(self))
            if name.startswith("kind_") and name[5:] not in without
        ]

    @property
    def kinds(self) -> list[str]:
        return [name for name, _ in self._kinds]

    def take(self, count: int) -> list[Hostile]:
        """Draw messages: one in ten is honest, and the others are of all hostile kinds equally often."""
        return [self.honest() if self._draw.random() < 0.1 else self._hostile() for _ in range(count)]

    def honest(self) -> Hostile:
        draw = self._draw
        priority = draw.choice([0, 3, 6, 9])
        made = message(
            body({"prompt": self._text(), "sampling_params": params()}), request_id=self._id(), tenant=draw.choice("ab")
        )
        made["properties"]["priority"] = priority
        self._honest_ids.append(made["headers"]["id"])
        if not priority:
            self._urgent_honest_ids.append(made["headers"]["id"])
        return Hostile("honest", dumps(made), f"{QUEUE}{SEPARATOR}{priority}" if priority else QUEUE, honest=True)

    def _hostile(self) -> Hostile:
        name, make = self._draw.choice(self._kinds)
        made = make()
        self._last = made if isinstance(made, bytes) else dumps(made)
        return Hostile(name, self._last)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _id(self) -> str:
        return str(self._draw.getrandbits(128))

    def _text(self) -> str:
        return f"{SECRET} turns {self._draw.randrange(1000)} times"

    def _good(self, **changes: Any) -> dict[str, Any]:
        changes.setdefault("request_id", self._id())
        return message(body({"prompt": self._text(), "sampling_params": params()}), **changes)

    def _with_kwargs(self, kwargs: Any) -> dict[str, Any]:
        return message(body(kwargs), request_id=self._id())

    def _odd(self, depth: int = 0) -> Any:
        """Any value that JSON and msgpack have, and some that only one of them has."""
        draw = self._draw
        leaves: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 0.0, -0.0, 1e308, 5e-324]
        leaves += [
            float("nan"),
            float("inf"),
            "",
            SECRET,
            "\x00",
            "\n",
            "💥" * 9,
            "a" * 300,
            " ",
            "-1",
            "NaN",
            "../..",
            "*",
        ]
        if depth > 3 or draw.random() < 0.7:
            return draw.choice(leaves)
        items = [self._odd(depth + 1) for _ in range(draw.randrange(4))]
        return items if draw.random() < 0.5 else {str(self._odd(9)): item for item in items}

    def _packed_odd(self) -> bytes:
        odd = self._odd()
        try:
            return msgpack.packb(odd)
        except (OverflowError, ValueError):
            return b"\xc0"

    # -- the envelope -------------------------------------------------------------------------------------------------

    def kind_bytes_changed(self) -> bytes:
        raw = bytearray(dumps(self._good()))
        for _ in range(self._draw.randrange(1, 6)):
            where = self._draw.randrange(len(raw))
            match self._draw.randrange(3):
                case 0:
                    raw[where] = self._draw.randrange(256)
                case 1:
                    del raw[where]
                case _:
                    raw.insert(where, self._draw.randrange(256))
        return bytes(raw)

    def kind_cut_short(self) -> bytes:
        raw = dumps(self._good())
        return raw[: self._draw.randrange(len(raw))]

    def kind_random_bytes(self) -> bytes:
        return self._draw.randbytes(self._draw.choice([0, 1, 2, 30, 3000]))

    def kind_random_json(self) -> bytes:
        return dumps(self._odd())

    def kind_deep_json(self) -> bytes:
        depth = self._draw.choice([50, 900, 50_000])
        good = json.dumps(self._good())
        deep = self._draw.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth])
        return self._draw.choice(
            [deep, good[:-1] + f', "x": {deep}}}', good.replace('"headers": {', f'"headers": {{"stamps": {deep},')]
        ).encode()

    def kind_giant_number(self) -> bytes:
        number = self._draw.choice(["1" * 5000, "1e999", "-1e999", "NaN", "-Infinity", "9" * 400])
        field = self._draw.choice(["priority", "delivery_mode"])
        return json.dumps(self._good()).replace(f'"{field}": ', f'"{field}": {number}, "old": ').encode()

    def kind_field_changed(self) -> dict[str, Any]:
        good = self._good()
        place, names = self._draw.choice(
            [(good, list(good)), (good["headers"], HEADERS), (good["properties"], PROPERTIES)]
        )
        name = self._draw.choice(names)
        place[name] = self._odd()
        headers = good["headers"]
        if isinstance(headers, dict):  # neither is text of a prompt, and both are logged
            if SECRET in str(headers.get("task")):
                headers["task"] = "no such task"
            if SECRET in str(headers.get("id")):
                headers["id"] = self._id()
        return good

    def kind_field_missing(self) -> dict[str, Any]:
        good = self._good()
        place = self._draw.choice([good, good["headers"], good["properties"]])
        del place[self._draw.choice(list(place))]
        return good

    def kind_old_protocol(self) -> dict[str, Any]:
        good = self._good()
        content = {"task": "headrace.generate", "id": self._id(), "args": [], "kwargs": {"prompt": self._text()}}
        content |= {self._draw.choice([*content, "eta", "expires", "utc", "callbacks", "taskset"]): self._odd()}
        if SECRET in str(content["task"]):
            content["task"] = "no such task"
        if SECRET in str(content["id"]):
            content["id"] = self._id()
        good["headers"] = {}
        try:
            good["body"] = base64.b64encode(msgpack.packb(content)).decode()
        except (OverflowError, ValueError):
            good["body"] = ""
        return good

    def kind_json_body(self) -> dict[str, Any]:
        params = {self._draw.choice(PARAMS): self._odd()}
        content = json.dumps([[], {"prompt": self._text(), "sampling_params": params}, EMBED]).encode()
        cut = self._draw.randrange(len(content)) if self._draw.random() < 0.2 else len(content)
        content_type = {"content_type": "application/json", "content_encoding": "utf-8"}
        return message(content[:cut], request_id=self._id(), **content_type)

    def kind_bad_base64(self) -> dict[str, Any]:
        good = self._good()
        good["body"] = self._draw.choice([good["body"][:-3], "é" + good["body"], "===", SECRET, good["body"] * 2, ""])
        return good

    def kind_lone_surrogate(self) -> bytes:
        good = json.dumps(self._good(tenant="a", kwargsrepr="b", origin="c"))
        name = self._draw.choice(["id", "tenant", "task", "origin", "kwargsrepr", "correlation_id", "routing_key"])
        return good.replace(f'"{name}": "', f'"{name}": "\\ud83d').encode()

    def kind_content_type(self) -> dict[str, Any]:
        types = [
            "application/json",
            "application/x-yaml",
            "application/data",
            "application/text",
            "text/plain",
            "",
            "x",
        ]
        encodings = [
            "utf-8",
            "binary",
            "idna",
            "punycode",
            "zlib_codec",
            "bz2_codec",
            "rot13",
            "utf-16",
            "hex",
            "",
            "no",
        ]
        good = self._good(content_type=self._draw.choice(types), content_encoding=self._draw.choice(encodings))
        if self._draw.random() < 0.5:
            good["headers"] = {}  # protocol 1, whose body Celery decodes at once
        return good

    def kind_pickle(self) -> dict[str, Any]:
        content = pickle.dumps([[], {"prompt": self._text()}, EMBED])
        types = ["application/x-python-serialize", "application/x-msgpack"]
        return message(content, content_type=self._draw.choice(types), request_id=self._id())

    def kind_compressed_bomb(self) -> dict[str, Any]:
        bomb = message(_BOMB, request_id=self._id())
        if self._draw.random() < 0.5:
            bomb["headers"]["compression"] = "application/x-gzip"
        else:
            bomb |= {"content-type": "application/data", "content-encoding": "zlib_codec", "headers": {}}
        return bomb

    def kind_absurd_size(self) -> dict[str, Any]:
        size = self._draw.choice([300, 3000, 30_000])
        match self._draw.randrange(5):
            case 0:
                return self._with_kwargs({"prompt": f"{SECRET} " * size})
            case 1:
                return self._with_kwargs({"prompt_token_ids": [5] * (10 * size)})
            case 2:
                return self._with_kwargs({"messages": [{"role": "user", "content": SECRET}] * size})
            case 3:
                return self._with_kwargs({f"{SECRET}{number}": number for number in range(size)})
            case _:
                return self._good(kwargsrepr=SECRET * size, **{f"x{number}": number for number in range(size // 10)})

    def kind_unknown_task(self) -> dict[str, Any]:
        names = ["celery.chord_unlock", "celery.map", "celery.starmap", "celery.chunks", "celery.group", "celery.chain"]
        names += [
            "celery.chord",
            "celery.accumulate",
            "celery.backend_cleanup",
            "os.system",
            "",
            "headrace.generate ",
            "x" * 9999,
        ]
        content = body({"task": {"task": "headrace.generate"}, "it": [[SECRET]] * 3, "tasks": [], "result": [SECRET]})
        return message(content, task=self._draw.choice(names), request_id=self._id(), kwargsrepr=SECRET)

    def kind_odd_id(self) -> dict[str, Any]:
        ids = [
            "",
            " ",
            "\n",
            "\x00",
            "../../x",
            "*",
            "é💥",
            "x" * 5000,
            "headrace:dead:headrace.tiny",
            "a b",
            "{a}",
            "%s",
            "'; drop",
            "-",
            "0",
        ]
        return self._good(request_id=self._draw.choice(ids) + self._draw.choice(["", self._id()]))

    def kind_same_message(self) -> bytes:
        return self._last

    def kind_same_id(self) -> dict[str, Any]:
        return self._good(request_id=self._draw.choice(self._honest_ids) if self._honest_ids else "same")

    def kind_same_id_and_worse(self) -> dict[str, Any]:
        """Make a message that could end the honest request with its id, or change that request's answer."""
        request_id = self._urgent_honest_ids[-1] if self._urgent_honest_ids else "same"
        match self._draw.randrange(7):
            case 0:
                return message(b"\xc1", request_id=request_id)
            case 1:
                return message(msgpack.packb([1, self._text()]), request_id=request_id)
            case 2:
                return self._good(request_id=request_id, expires="2001-01-01T00:00:00")
            case 3:
                return self._good(request_id=request_id, task="os.system")
            case 4:
                return self._good(request_id=request_id, compression="application/x-gzip")
            case 5:
                return message(body({"prompt": self._text(), "sampling_params": {"n": 0}}), request_id=request_id)
            case _:
                return message(
                    body({"prompt": self._text(), "sampling_params": params(max_tokens=9)}), request_id=request_id
                )

    # -- fields that the queue reads ----------------------------------------------------------------------------------

    def kind_far_eta(self) -> dict[str, Any]:
        etas: list[Any] = [(self._now + timedelta(days=days)).isoformat() for days in (2, 400, 40_000)]
        etas += ["9999-12-31T23:59:59", "0001-01-01T00:00:00+14:00", "yesterday", 5, -1, ["x"], {}, "1e9", "2026-13-45"]
        return self._good(eta=self._draw.choice(etas))

    def kind_expires(self) -> dict[str, Any]:
        times: list[Any] = [(self._now + timedelta(days=days)).isoformat() for days in (-400, -1, 1, 40_000)]
        times += [0, -1, 1, 1e18, True, "never", [], {}, "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"]
        return self._good(expires=self._draw.choice(times))

    def kind_time_limits(self) -> dict[str, Any]:
        limits: list[Any] = [
            [-1, None],
            [1e300, 1],
            [None],
            [0, 0],
            ["a", "b"],
            {},
            7,
            "long",
            [True, False],
            [1, 2, 3],
        ]
        eta = self._draw.choice([None, None, "2099-01-01T00:00:00+00:00"])
        return self._good(timelimit=self._draw.choice(limits), eta=eta)

    def kind_queue_headers(self) -> dict[str, Any]:
        good = self._good(
            **{name: self._odd() for name in ("tenant", "idempotency_key", "enqueued_at", "traceparent", "retries")}
        )
        good["properties"]["priority"] = self._odd()
        return good

    def kind_odd_headers(self) -> dict[str, Any]:
        """Several headers at once, among them values that JSON has and msgpack has not."""
        names = [name for name in HEADERS if name not in ("task", "id")]
        values = ["lone \ud83d", 10**400, -(10**400), "x" * 70_000, [["x"]], {"x": []}]
        odd = {name: self._draw.choice([*values, self._odd()]) for name in self._draw.sample(names, 3)}
        return self._good(**odd)

    def kind_linked(self) -> dict[str, Any]:
        call = {"task": "celery.backend_cleanup", "args": [], "kwargs": {"prompt": SECRET}, "options": {"queue": QUEUE}}
        call |= {"subtask_type": None, "immutable": True, "chord_size": None}
        links: list[Any] = [[call], [self._odd()], call, self._odd()]
        embed = {name: self._draw.choice([None, *links]) for name in EMBED} | {"callbacks": self._draw.choice(links)}
        try:
            content = msgpack.packb([[], {"prompt": self._text(), "sampling_params": params()}, embed])
        except (OverflowError, ValueError):
            content = b"\x93\x90\x80\x05"
        return message(content, request_id=self._id(), group=self._draw.choice([None, "g"]))

    # -- the body -----------------------------------------------------------------------------------------------------

    def kind_msgpack_bomb(self) -> dict[str, Any]:
        depth = self._draw.choice([400, 1200, 200_000])
        bombs = [
            b"\x91" * depth + b"\xc0",
            b"\x81\xa1a" * depth + b"\xc0",
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xffx",
            b"\xc6\xff\xff\xff\xffx",
            b"\xc9\xff\xff\xff\xff\x01x",
            b"\xdd\x00\x0f\xff\xff" + b"\xc0" * 99,
            b"\x93\x90\x81\xa6prompt" + b"\x91" * depth + b"\xc0" + b"\x80",
            b"\x93\x90\x81\xa6prompt\xa4\xff\xfe\xfd\xfc\x80",
            b"\x93\x90\x81\xa6prompt\xd6\xff\xff\xff\xff\xff\x80",
            b"\x93\x90\x81\xa6prompt\xc7\x04\x07abcd\x80",
            b"\x93\x90\x82\xa6prompt\xa1x\xa6prompt\xa1y\x80",
            b"\x93\x90\x81\xa6prompt\xcb" + struct.pack(">d", float("nan")) + b"\x80",
            b"\x93\x90\x81\x90\xa1x\x80",
            b"\xc1",
            b"",
        ]
        return message(self._draw.choice(bombs), request_id=self._id())

    def kind_msgpack_changed(self) -> dict[str, Any]:
        content = bytearray(body({"prompt": self._text(), "sampling_params": params(logprobs=1, stop=["z"])}))
        for _ in range(self._draw.randrange(1, 4)):
            content[self._draw.randrange(len(content))] = self._draw.randrange(256)
        return message(bytes(content[: self._draw.choice([None, 5, -1])]), request_id=self._id())

    def kind_random_body(self) -> dict[str, Any]:
        head = self._draw.choice([b"", b"\x93\x90", b"\x93", b"\x94\x90\x80\x80"])
        return message(head + self._packed_odd() + self._packed_odd(), request_id=self._id())

    def kind_wrong_parameter(self) -> dict[str, Any]:
        odd = {self._draw.choice(PARAMS): self._odd() for _ in range(self._draw.randrange(1, 4))}
        return self._with_kwargs({"prompt": self._text(), "sampling_params": {**params(), **odd}})

    def kind_wrong_form(self) -> dict[str, Any]:
        name = self._draw.choice(["json", "regex", "choice", "grammar", "json_object", "x"])
        odd: list[Any] = [
            self._odd(),
            "(" * 500,
            "(a{9999}){9999}",
            "(a|a)*" * 40,
            {"$ref": "#"},
            {"type": SECRET},
            "start: start start",
        ]
        odd += [{"type": "array", "items": {"$ref": "#"}}, "[[" * 200, "start: /" + "a?" * 500 + "/", [SECRET] * 2000]
        return self._with_kwargs(
            {"prompt": self._text(), "sampling_params": params(structured_outputs={name: self._draw.choice(odd)})}
        )

    def kind_wrong_arguments(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"prompt": self._text(), "sampling_params": params()}
        keys = ["prompt", "prompt_token_ids", "messages", "model", "lora", "sampling_params", "x", SECRET]
        for _ in range(self._draw.randrange(1, 3)):
            kwargs[self._draw.choice(keys)] = self._odd()
        return self._with_kwargs(kwargs)

    def kind_wrong_chat(self) -> dict[str, Any]:
        chat: list[Any] = [
            {"role": self._odd(), "content": self._odd()},
            {"role": "user", "content": self._text()},
            self._odd(),
        ]
        self._draw.shuffle(chat)
        return self._with_kwargs({"messages": chat[: self._draw.randrange(4)]})

    def kind_wrong_token_ids(self) -> dict[str, Any]:
        ids: list[Any] = [5, 6, -1, 2**31, 2**63, 1e9, None, True, "5", [5], 383, 384, 10**6]
        return self._with_kwargs({"prompt_token_ids": self._draw.choices(ids, k=self._draw.randrange(5))})


def params(**more: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": HONEST_TOKENS, "ignore_eos": True, **more}


def body(kwargs: Any) -> bytes:
    """Return a body of protocol 2. Values that msgpack cannot pack become nil."""
    try:
        return msgpack.packb([[], copy.copy(kwargs), EMBED])
    except (OverflowError, ValueError):
        return msgpack.packb([[], None, EMBED])


def dumps(value: Any) -> bytes:
    return json.dumps(value, default=str).encode()
