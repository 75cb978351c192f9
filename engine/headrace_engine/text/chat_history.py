"""Writes the tool calls of a conversation in a form that the chat template can show.

Templates differ: arguments of calls as a map or as text, an empty content or null, several calls in a message or one,
text beside calls or not, any ids or short ones. A template refuses a form that it does not know, or silently leaves
out the call. So `find_form` tries the forms with probes, as in llama.cpp, and takes the first one that works.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from headrace_engine.errors import InvalidRequestError

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[list[dict[str, Any]]], str]
"""Renders messages. If the template refuses them, it may raise any exception."""

_ID = re.compile(r"[A-Za-z0-9]{9}")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class HistoryForm:
    """The form in which a template takes tool calls and their results. Most templates take the default."""

    text_arguments: bool = False
    """The arguments are JSON text instead of a map."""
    null_content: bool = False
    """The content of a message with calls is null instead of an empty text."""
    short_ids: bool = False
    """Ids have nine letters and digits."""
    one_call: bool = False
    """A message has at most one call, and the result of the call is the next message."""
    calls_apart: bool = False
    """Text and calls are in separate messages."""
    calls_in_text: bool = False
    """Calls are part of the text, in the syntax of Hermes."""
    user_results: bool = False
    """Results are messages of the user."""


def find_form(render: Render) -> HistoryForm | None:
    """Return the first form in which a template shows calls completely. Return None if there is no such form."""
    for shows, form in itertools.product((_shows_exactly, _shows), _simple_forms()):
        if _works(form, render, shows, num_calls=1):
            if not _works(form, render, shows, num_calls=2):
                form = replace(form, one_call=True)
            if not _works(form, render, shows, num_calls=2, text="words_before"):
                form = replace(form, calls_apart=True)
            if _works(form, render, shows, num_calls=2, text="words_before"):
                return form
    return None


def _simple_forms() -> Iterator[HistoryForm]:
    for user_results, short, null, text in itertools.product((False, True), repeat=4):
        yield HistoryForm(text_arguments=text, null_content=null, short_ids=short, user_results=user_results)
    for user_results in (False, True):
        yield HistoryForm(calls_in_text=True, user_results=user_results)


def fitted(messages: Sequence[Message], form: HistoryForm | None) -> list[dict[str, Any]]:
    """Return the messages in a form.

    Raises:
        InvalidRequestError: there is no form.
    """
    if form is None:
        raise InvalidRequestError(
            "it shows tool calls in no form: send them as text, calls as the assistant's and results as the user's"
        )
    found = _with_ids(messages)
    if form.one_call:
        found = list(_one_by_one(found))
    found = [each for message in found for each in _assistant(message, form)]
    if form.user_results:
        found = list(_merged(map(_user_result, found)))
    return _with_short_ids(found) if form.short_ids else found


def has_calls(messages: Iterable[Message]) -> bool:
    """Whether a conversation has tool calls, or results of them."""
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def _with_ids(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Give an id to each call and result without one. Results without an id belong to the calls in order."""
    found: list[dict[str, Any]] = []
    waiting: list[str] = []
    for position, message in enumerate(messages):
        copied = dict(message)
        if copied.get("tool_calls"):
            copied["tool_calls"] = [
                {**call, "id": call.get("id") or f"call_{position}_{number}"}
                for number, call in enumerate(copied["tool_calls"])
            ]
            waiting = [call["id"] for call in copied["tool_calls"]]
        elif copied["role"] == "tool":
            if not copied.get("tool_call_id"):
                copied["tool_call_id"] = waiting[0] if waiting else f"call_{position}"
            if copied["tool_call_id"] in waiting:
                waiting.remove(copied["tool_call_id"])
        found.append(copied)
    return found


def _one_by_one(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield each call of a message in a message of its own, followed by the result of the call."""
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield dict(message)
            continue
        results = list(itertools.takewhile(lambda each: each["role"] == "tool", messages[position:]))
        position += len(results)
        for number, call in enumerate(calls):
            yield {**message, "content": "" if number else message["content"], "tool_calls": [call]}
            yield from (dict(result) for result in results if result["tool_call_id"] == call["id"])
        ids = {call["id"] for call in calls}
        yield from (dict(result) for result in results if result["tool_call_id"] not in ids)


def _assistant(message: dict[str, Any], form: HistoryForm) -> Iterator[dict[str, Any]]:
    """Yield a message, with its calls in the form."""
    calls = message.get("tool_calls")
    if not calls:
        yield message
        return
    content = message["content"]
    if form.calls_in_text:
        written = "\n".join(map(_hermes, calls))
        message = {name: value for name, value in message.items() if name != "tool_calls"}
        yield {**message, "content": _added(content, written)}
        return
    if form.text_arguments:
        calls = [_with_text(call) for call in calls]
    if form.calls_apart and content:
        yield {name: value for name, value in message.items() if name != "tool_calls"}
        content = ""
    if form.null_content and not content:
        content = None
    yield {**message, "content": content, "tool_calls": calls}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _hermes(call: Mapping[str, Any]) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _user_result(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _merged(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages. Merge successive user messages, because many templates require alternating roles."""
    last: dict[str, Any] | None = None
    for message in messages:
        if last is not None and last["role"] == message["role"] == "user":
            last = {**last, "content": _added(last["content"], message["content"])}
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _added(content: Any, more: Any) -> Any:
    """Return two contents as one: a text, or a list of parts if one of them is a list."""
    if isinstance(content, str) and isinstance(more, str):
        return f"{content}\n{more}" if content else more
    return [part for each in (content, more) for part in (_parts(each) if isinstance(each, str) else each)]


def _parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def _with_short_ids(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Replace ids that are not nine letters and digits. Equal ids stay equal, and different ones different."""
    found = [dict(message) for message in messages]
    given = [call["id"] for message in found for call in message.get("tool_calls") or ()]
    given += [message["tool_call_id"] for message in found if message.get("tool_call_id")]
    taken = {each for each in given if _ID.fullmatch(each)}
    short: dict[str, str] = {each: each for each in taken}
    for each in given:
        attempt = 0
        while each not in short:
            made = _short(f"{each}{attempt or ''}")
            if made not in taken:
                taken.add(made)
                short[each] = made
            attempt += 1
    for message in found:
        if message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": short[call["id"]]} for call in message["tool_calls"]]
        if message.get("tool_call_id"):
            message["tool_call_id"] = short[message["tool_call_id"]]
    return found


def _short(text: str) -> str:
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    digits = []
    for _ in range(9):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits)


# The names in a probe must not occur in any template.
_PROBE_IDS = ("call_0123456789abcdefghijklmn", "call_nmlkjihgfedcba9876543210")
_PROBE_QUESTION = "probe_question"
PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": f"probe_tool_{letter}",
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {
                    f"probe_text_{letter}": {"type": "string", "description": "A text."},
                    f"probe_count_{letter}": {"type": "integer", "description": "A number."},
                },
                "required": [f"probe_text_{letter}"],
            },
        },
    }
    for letter in "ab"
]


def probe_call(letter: str) -> dict[str, Any]:
    """Return a call of one of PROBE_TOOLS, `a` or `b`."""
    arguments = {f"probe_text_{letter}": f"probe_value_{letter}", f"probe_count_{letter}": 7}
    function = {"name": f"probe_tool_{letter}", "arguments": arguments}
    return {"id": _PROBE_IDS["ab".index(letter)], "type": "function", "function": function}


def _works(
    form: HistoryForm, render: Render, shows: Callable[[str, str], bool], *, num_calls: int, text: str = ""
) -> bool:
    """Whether a template shows calls and results in this form, at the end and in the middle of a conversation."""
    letters = "ab"[:num_calls]
    calls = [probe_call(letter) for letter in letters]
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": _PROBE_QUESTION},
        {"role": "assistant", "content": text, "tool_calls": calls},
    ]
    turn += [
        {"role": "tool", "tool_call_id": call["id"], "content": f"probe_result_{letter}"}
        for letter, call in zip(letters, calls, strict=True)
    ]
    later = [{"role": "assistant", "content": "words_after"}, {"role": "user", "content": "And now?"}]
    for conversation in (turn, turn + later):
        try:
            rendered = render(fitted(conversation, form))
        except Exception:  # noqa: BLE001  # templates are programs of the authors of the model, and may raise anything
            return False
        if not all(shows(rendered, letter) for letter in letters):
            return False
    return True


def _shows(rendered: str, letter: str) -> bool:
    """Whether a prompt contains the call and, after it, its result."""
    wanted = (f"probe_text_{letter}", f"probe_value_{letter}", f"probe_count_{letter}")
    start = rendered.rfind(f"probe_value_{letter}")
    return (
        start >= 0
        and f"probe_tool_{letter}" in rendered
        and all(each in rendered for each in wanted)
        and rendered.find(f"probe_result_{letter}", start) >= 0
    )


def _shows_exactly(rendered: str, letter: str) -> bool:
    """Like `_shows`, but the arguments must not be shown as JSON within a JSON string, or as a Python literal."""
    name = f"probe_text_{letter}"
    chat = rendered[rendered.find(_PROBE_QUESTION) :]  # before it, a template may show tools as Python
    return _shows(chat, letter) and f'\\"{name}' not in chat and f"'{name}':" not in chat
