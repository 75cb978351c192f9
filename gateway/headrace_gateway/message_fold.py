"""Joins the events of a stream into the non-streaming message of Anthropic's API."""

from collections.abc import Iterable
from typing import Any

import msgspec

Event = dict[str, Any]


def fold_message(events: Iterable[Event]) -> Event:
    """Join all events of a successful message."""
    message: Event = {}
    inputs: dict[int, str] = {}
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = {**event["message"], "content": []}
        elif kind == "content_block_start":
            message["content"].append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            _add(message["content"][event["index"]], event["index"], event["delta"], inputs)
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = {**message["usage"], **event["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = input_of(text)
    return message


def _add(block: Event, index: int, delta: Event, inputs: dict[int, str]) -> None:
    if delta["type"] == "text_delta":
        block["text"] += delta["text"]
    elif delta["type"] == "thinking_delta":
        block["thinking"] += delta["thinking"]
    else:
        inputs[index] = inputs.get(index, "") + delta["partial_json"]


def input_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call. If they are not a JSON object, as when cut off, wrap them as Anthropic does."""
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
