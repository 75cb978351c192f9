"""`CallbackRules`: which links, chains and chords of a message are served. The operator names the tasks and the queues.

A worker sends callbacks with its own rights in Redis, so a message that asks for others is refused before it runs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, Final, Self

from headrace_broker.content import SERIALIZERS, loads
from headrace_broker.errors import MalformedMessageError
from headrace_broker.keys import result_key
from headrace_wire.errors import InvalidRequestError
from headrace_wire.values import is_integer, is_number, is_request_id, named, shown
from headrace_workers.preparation.option_sizes import OptionSizes

MAX_SIGNATURES: Final = 1000
"""Limit for the signatures of one message, with those inside groups, chains and chords."""
MAX_DEPTH: Final = 8
"""Limit for signatures inside signatures. Celery holds one of its 10 connections for each chord around another one."""
MAX_TOTAL_DEPTH: Final = 2500
"""Limit for the sum of the depths of all signatures. Celery's time to send them grows with it."""
MAX_BODY_BYTES: Final = 1 << 20
"""Limit for the body of a message with callbacks. It is decoded a second time when the request ends."""
DEFAULT_QUEUE: Final = "celery"
_QUEUE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_RESERVED: Final = (result_key(""), "celery-taskset-", "celeryev", "unacked")
_UUID: Final = re.compile(r"[0-9a-fA-F-]{32,36}", re.ASCII)
_KEYS: Final = {"task", "args", "kwargs", "options", "subtask_type", "immutable", "chord_size"}
_MEMBERS: Final = {"group": ("tasks",), "chain": ("tasks",), "chord": ("header", "body")}
_IDS: Final = {"task_id", "group_id", "root_id", "parent_id"}
_NESTED: Final = ("link", "link_error", "chain", "chord")
# what Celery's `apply_async` takes, without connections, exchanges, routes and codecs
_OPTIONS: Final = {
    *("queue", "priority", "serializer", "headers", "reply_to", "countdown", "eta", "expires", "time_limit"),
    *("soft_time_limit", "ignore_result", "retry", "retry_policy", "argsrepr", "kwargsrepr", "shadow", "delivery_mode"),
    *("group_index", "add_to_parent", "replaced_task_nesting", "stamped_headers", "immutable"),
    *_IDS,
    *_NESTED,
}
# what Celery's `as_task_v2` writes, and what Headrace's own headers say of the sender
_RESERVED_HEADERS: Final = {
    *("lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries", "timelimit", "root_id"),
    *("parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result", "replaced_task_nesting", "stamped_headers"),
    *("stamps", "tenant", "key_name", "compression", "callbacks", "errbacks", "chain", "chord"),
}
_ROUTES: Final = {"exchange", "exchange_type", "routing_key", "connection", "router", "producer", "publisher"}
_OWN_TASKS: Final = "headrace."
_CELERY_TASKS: Final = "celery."
_MAX_SECONDS: Final = 10 * 366 * 86_400
_MAX_INDEX: Final = 1 << 31
# the end of a body without links, as Celery writes it
_NO_LINKS_JSON: Final = '{"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'
_NO_LINKS_MSGPACK: Final = b"\x84\xa9callbacks\xc0\xa8errbacks\xc0\xa5chain\xc0\xa5chord\xc0"


@dataclass(frozen=True, slots=True)
class Links:
    """The callbacks of a message, as signatures that are plain data."""

    callbacks: list[dict[str, Any]]
    errbacks: list[dict[str, Any]]
    chain: list[dict[str, Any]]
    """The rest of the chain, the next step last."""
    chord: dict[str, Any] | None
    """The body of the chord whose header the message belongs to."""

    @classmethod
    def of(cls, embed: Mapping[str, Any]) -> Self:
        """Read the last part of a message's body. Raises InvalidRequestError."""
        lists = {name: _listed(name, embed.get(name)) for name in ("callbacks", "errbacks", "chain")}
        chord = embed.get("chord") or None
        if unknown := [name for name in embed if name not in (*lists, "chord") and embed[name]]:
            raise InvalidRequestError(f"unknown link {named(unknown[0])}")
        return cls(**lists, chord=chord)

    def ids_of_results(self) -> "Links":
        """Return only the ids of the results that somebody may wait for: of the chain, and of bodies of chords."""
        steps = [each for each in (self.chord, *self.chain[:MAX_SIGNATURES]) if isinstance(each, dict)]
        kwargs = [each.get("kwargs") for each in steps if each.get("subtask_type") == "chord"]
        bodies = [each.get("body") for each in kwargs if isinstance(each, dict)]
        options = (each.get("options") for each in (*steps, *bodies) if isinstance(each, dict))
        ids = (each.get("task_id") for each in options if isinstance(each, dict))
        return Links([], [], [{"task": "", "options": {"task_id": each}} for each in ids if is_request_id(each)], None)

    def __bool__(self) -> bool:
        return bool(self.callbacks or self.errbacks or self.chain or self.chord)

    def signatures(self) -> Iterator[tuple[str, Any]]:
        """Yield the signatures with the names of their places."""
        for place in ("callbacks", "errbacks", "chain"):
            for signature in getattr(self, place):
                yield place, signature
        if self.chord is not None:
            yield "chord", self.chord


@dataclass(frozen=True, slots=True)
class CallbackRules:
    """Checks links.

    Args:
        tasks: names of tasks, or patterns such as `shop.*`. None: links are refused.
        queues: names of queues. Callbacks that name none go to the first one.
    """

    tasks: tuple[str, ...] = ()
    queues: tuple[str, ...] = (DEFAULT_QUEUE,)

    def check(self, embed: Mapping[str, Any]) -> None:
        """Raise InvalidRequestError if a message has links that this worker does not serve."""
        links = Links.of(embed)
        if not links:
            return
        found = total = 0
        seen: list[dict[str, Any]] = []
        pending = [(place, signature, 1) for place, signature in links.signatures()]
        while pending:
            place, signature, depth = pending.pop()
            found += 1
            if found > MAX_SIGNATURES:
                raise InvalidRequestError(f"a message must have at most {MAX_SIGNATURES} callbacks in all")
            if depth > MAX_DEPTH:
                raise InvalidRequestError(f"callbacks must be nested at most {MAX_DEPTH} deep")
            total += depth
            if total > MAX_TOTAL_DEPTH:
                raise InvalidRequestError(f"the depths of all callbacks must be at most {MAX_TOTAL_DEPTH} in sum")
            pending += [(name, inner, depth + 1) for name, inner in self._checked(place, signature)]
            seen.append(signature)
        sizes = OptionSizes()
        for signature in seen:
            sizes.add(signature.get("options"), has_members=bool(signature.get("subtask_type")))

    def check_sent(self, embed: Mapping[str, Any]) -> None:
        """Raise InvalidRequestError if the links in a message that Celery built name a task or queue not permitted."""
        pending = [signature for _, signature in Links.of(embed).signatures()]
        while pending:
            signature = pending.pop()
            options = signature.get("options") or {}
            if not signature.get("subtask_type") and not self.permits(signature.get("task")):
                raise InvalidRequestError(f"the callback {named(signature.get('task'))} is not permitted")
            if options.get("queue") not in (None, "", *self.queues) or _ROUTES & options.keys():
                raise InvalidRequestError("a callback goes to a queue that is not permitted")
            pending += [inner for _, inner in _inside(signature, options)]

    def permits(self, task: object) -> bool:
        """Return whether a message may start a task of this name. No pattern permits a task of Celery's own."""
        if not isinstance(task, str):
            return False
        if task.startswith(_CELERY_TASKS):
            return task in self.tasks
        return any(fnmatchcase(task, pattern) for pattern in self.tasks)

    def links_in(self, body: bytes | str, content_type: str) -> Links | None:
        """Return the links of an encoded body; None if it has none.

        If they are refused, only the ids of results that fail are returned, as a chain.
        """
        if _is_plain(body):
            return None
        try:
            _, _, embed = loads(body, content_type)
            links = Links.of(embed)
        except (MalformedMessageError, InvalidRequestError, TypeError, ValueError, AttributeError):
            return None
        if len(body) > MAX_BODY_BYTES:
            return links.ids_of_results() or None
        try:
            self.check(embed)
        except InvalidRequestError:
            links = links.ids_of_results()
        return links or None

    def _checked(self, place: str, signature: Any) -> Iterator[tuple[str, Any]]:
        """Check one signature, and yield the signatures inside it."""
        if not isinstance(signature, dict) or not isinstance(signature.get("task"), str):
            raise InvalidRequestError(f"a signature of {place} must be a map with a task, got {shown(signature)}")
        task, kind = signature["task"], signature.get("subtask_type")
        if unknown := signature.keys() - _KEYS:
            raise InvalidRequestError(f"the callback {named(task)} has the unknown key {named(min(unknown, key=str))}")
        if not isinstance(signature.get("args") or [], list | tuple) or not isinstance(
            signature.get("kwargs") or {}, dict
        ):
            raise InvalidRequestError(f"args of the callback {named(task)} must be a list, and kwargs a map")
        options = signature.get("options") or {}
        if not isinstance(options, dict):
            raise InvalidRequestError(f"options of the callback {named(task)} must be a map, got {shown(options)}")
        self._check_options(task, options)
        if kind is None:
            self._check_task(task, options)
        elif kind not in tuple(_MEMBERS) or task != f"celery.{kind}":
            raise InvalidRequestError(f"the callback {named(task)} must be a task, group, chain or chord")
        elif place == "errbacks":
            raise InvalidRequestError(f"an errback must be one task, got {named(task)}")
        yield from _inside(signature, options)

    def _check_task(self, task: str, options: Mapping[str, Any]) -> None:
        if not self.permits(task):
            allowed = f"permits {', '.join(self.tasks)}" if self.tasks else "is empty"
            raise InvalidRequestError(
                f"the callback {named(task)} is not permitted: the workers' setting HEADRACE_CALLBACK_TASKS {allowed}"
            )
        if task.startswith(_OWN_TASKS) and not options.get("queue") and not self.queues[0].startswith(_OWN_TASKS):
            raise InvalidRequestError(f"the callback {named(task)} must name the queue of its model")

    def _check_options(self, task: str, options: Mapping[str, Any]) -> None:
        if options.get("stamped_headers"):  # a stamp is an option of any name, which Celery passes to its own functions
            raise InvalidRequestError(f"stamps, here of the callback {named(task)}, are not served")
        for name, value in options.items():
            if name not in _OPTIONS:
                raise InvalidRequestError(
                    f"the callback {named(task)} has the option {named(name)}, which is not served"
                )
            if value is not None and (problem := self._option_problem(name, value)):
                raise InvalidRequestError(f"{name} of the callback {named(task)} {problem}")

    def _option_problem(self, name: str, value: Any) -> str | None:
        if name == "queue" and value not in self.queues:
            queues = ", ".join(self.queues)
            return f"must be a queue of the workers' setting HEADRACE_CALLBACK_QUEUES ({queues}), got {shown(value)}"
        if name in _IDS and not is_request_id(value):
            return f"must be an id, got {shown(value)}"
        if name == "priority" and not (is_integer(value) and 0 <= value <= 9):
            return f"must be 0 to 9, got {shown(value)}"
        if name == "serializer" and value not in SERIALIZERS.values():
            return f"must be {' or '.join(SERIALIZERS.values())}, got {shown(value)}"
        if name == "reply_to" and not (isinstance(value, str) and (not value or _UUID.fullmatch(value))):
            return f"must be a UUID, got {shown(value)}"
        if name in ("eta", "expires", "countdown", "time_limit", "soft_time_limit", "group_index"):
            return _number_problem(name, value)
        if name == "headers" and isinstance(value, dict) and (taken := _RESERVED_HEADERS.intersection(value)):
            return f"must not have {named(min(taken))}"
        if name in ("headers", "retry_policy") and not isinstance(value, dict):
            return f"must be a map, got {shown(value)}"
        return None


def group_index_of(value: object) -> int | None:
    """Return the number of a chord's part, or None if the value is none."""
    return value if is_integer(value) and 0 <= value < _MAX_INDEX else None


def _number_problem(name: str, value: object) -> str | None:
    """Return why a time or a number of an option cannot be used, or None."""
    if name == "group_index":
        return None if group_index_of(value) is not None else f"must be 0 to {_MAX_INDEX - 1}, got {shown(value)}"
    if name in ("eta", "expires") and isinstance(value, str):
        try:
            datetime.fromisoformat(value)
        except ValueError:
            return f"must be a time in ISO 8601, got {shown(value)}"
        return None
    if name == "eta" or not is_number(value) or not 0 <= value <= _MAX_SECONDS:
        return f"must be 0 to {_MAX_SECONDS} seconds, got {shown(value)}"
    return None


def queue_problem(name: str) -> str | None:
    """Return why callbacks may not be sent to a queue of this name, or None."""
    if not _QUEUE.fullmatch(name):
        return f"must be 1 to 128 of the characters A-Z a-z 0-9 . _ -, got {name!r}"
    if name.startswith(_RESERVED):
        return f"must not begin with {' or '.join(_RESERVED)}, got {name!r}"
    return None


def _inside(signature: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the signatures inside a signature, with the names of their places."""
    for name in _NESTED:
        place = "errbacks" if name == "link_error" else name
        yield from ((place, inner) for inner in _listed(name, options.get(name)))
    kwargs, kind = signature.get("kwargs") or {}, signature.get("subtask_type")
    for name in _MEMBERS.get(str(kind), ()):
        yield from ((name, inner) for inner in _listed(name, kwargs.get(name)))


def _listed(name: str, value: Any) -> list[Any]:
    """Return the signatures of a value that may be one signature, a list, or nothing."""
    if not value:
        return []
    if not isinstance(value, dict | list | tuple):
        raise InvalidRequestError(f"{name} must be a list of signatures, got {shown(value)}")
    return [value] if isinstance(value, dict) else list(value)


def _is_plain(body: bytes | str) -> bool:
    """Return whether a body ends like one without links, so that it need not be decoded."""
    if isinstance(body, str):
        return body.endswith(_NO_LINKS_JSON)
    return body.endswith((_NO_LINKS_MSGPACK, _NO_LINKS_JSON.encode()))
