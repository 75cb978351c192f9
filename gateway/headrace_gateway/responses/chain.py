"""Stored items that a request refers to, by `previous_response_id` and by `item_reference`."""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from headrace_gateway.answers.envelope import Envelope
from headrace_gateway.context import Gateway
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.requests.body import model_named
from headrace_gateway.requests.call import ResponseOptions
from headrace_gateway.responses.input_items import Item
from headrace_gateway.responses.replay import replay
from headrace_wire.codes import GatewayCode

MAX_LINKS: Final = 100
MAX_BYTES: Final = 4 * 2**20
_PARAM: Final = "previous_response_id"
_ITEM_ID: Final = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{32})_i?[0-9]{1,6}")
_ENCODE: Final = msgspec.json.Encoder().encode


async def read_history(gateway: Gateway, key: ApiKey, previous: Any) -> list[Item]:
    """Return the items of the chain that ends with this response, oldest first.

    Raises ApiError 400 if a response is missing, belongs to another key or is not finished, and if there are too many.
    """
    links: list[list[Item]] = []
    size = _Size(f"the responses that {_PARAM} continues")
    while isinstance(previous, str):
        if len(links) == MAX_LINKS:
            raise invalid(f"{_PARAM} must continue at most {MAX_LINKS} responses", param=_PARAM)
        envelope = await _envelope(gateway, key, previous)
        items = await _items(gateway, envelope)
        size.add(items, _PARAM)
        links.append(items)
        assert isinstance(envelope.options, ResponseOptions)
        previous = envelope.options.config[_PARAM]
    return [item for items in reversed(links) for item in items]


class NamedItems(NamedTuple):
    """The model and the stored items that a body refers to."""

    model: str | None
    previous: str | None
    """The body's `previous_response_id`; None if it is not a string."""
    items: dict[str, str]
    """For each response whose items `input` refers to: the field of the first reference."""


def stored_items_named(body: Mapping[str, Any]) -> NamedItems:
    """Return the model and the stored items that a body names.

    Raises ApiError 400 for a reference that is not an item's id, and for references to too many responses.
    """
    previous, given = body.get(_PARAM), body.get("input")
    found: dict[str, str] = {}
    for position, item in enumerate(given) if isinstance(given, list) else ():
        if _is_reference(item):
            found.setdefault(_response_of(item, path := f"input[{position}].id"), path)
            if len(found) > MAX_LINKS:
                raise invalid(f"input must refer to items of at most {MAX_LINKS} responses", param=path)
    return NamedItems(model_named(body), previous if isinstance(previous, str) else None, found)


async def read_named(gateway: Gateway, key: ApiKey, named: Mapping[str, str]) -> dict[str, Item]:
    """Return the items of these responses by id. Raises ApiError 400 if they are too large."""
    found: dict[str, Item] = {}
    size = _Size("the responses whose items input refers to")
    for response_id, path in named.items():
        items = await _items_by_id(gateway, key, response_id)
        size.add(list(items.values()), path)
        found |= items
    return found


def with_references(given: Any, items: Mapping[str, Item]) -> Any:
    """Return `input` with each reference replaced by its item. All else is returned unchecked.

    Raises ApiError 400 if an item is not stored, and if the items are too large.
    """
    if not isinstance(given, list):
        return given
    size = _Size("the items that input refers to")
    found = []
    for position, item in enumerate(given):
        if not _is_reference(item):
            found.append(item)
            continue
        path = f"input[{position}].id"
        named = items.get(str(item.get("id")))
        if named is None:
            raise _no_item(path)
        size.add(named, path)  # each reference counts: the chat's messages repeat the text
        found.append(named)
    return found


def _is_reference(item: object) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference"


def _response_of(item: Item, path: str) -> str:
    match = _ITEM_ID.fullmatch(str(item.get("id"))[:80])
    if match is None:
        raise _no_item(path)
    return f"resp_{match[1]}"


def _no_item(path: str) -> ApiError:
    return invalid("no item with this id is stored: send the item itself", code=GatewayCode.ITEM_NOT_FOUND, param=path)


class _Size:
    """The bytes of all items read so far, encoded as JSON.

    Args:
        what: the subject of the error's sentence.
    """

    def __init__(self, what: str) -> None:
        self._what: Final = what
        self._bytes = 0

    def add(self, items: list[Item] | Item, param: str) -> None:
        """Add items. Raises ApiError 400 if the total is too large."""
        self._bytes += len(_ENCODE(items))
        if self._bytes > MAX_BYTES:
            raise invalid(f"{self._what} must have at most {MAX_BYTES} bytes: start a new conversation", param=param)


async def _items_by_id(gateway: Gateway, key: ApiKey, response_id: str) -> dict[str, Item]:
    try:
        envelope = await _envelope(gateway, key, response_id)
        return {item["id"]: item for item in await _items(gateway, envelope)}
    except ApiError as error:
        if error.status == 400:
            return {}
        raise


async def _envelope(gateway: Gateway, key: ApiKey, response_id: str) -> Envelope:
    try:
        envelope = await gateway.envelopes.get(response_id, key)
    except ApiError as error:
        if error.status == 404:
            raise _not_found(response_id) from None
        raise
    if not isinstance(envelope.options, ResponseOptions):
        raise _not_found(response_id)
    return envelope


async def _items(gateway: Gateway, envelope: Envelope) -> list[Item]:
    """Return the input and the output of one response."""
    items = await gateway.responses.input_items(envelope.id)
    if items is None:
        raise _not_found(envelope.id)
    state = await gateway.responses.state(envelope.id)
    if state is None:
        stream = await replay(gateway.streams, envelope)
        if stream is None:
            raise _not_found(envelope.id)
        if not stream.has_ended:
            message = f"the response {envelope.id!r} is not finished: wait until it ends, or cancel it"
            raise invalid(message, code=GatewayCode.PREVIOUS_RESPONSE_NOT_FINISHED, param=_PARAM)
        state = stream.state()
    return [*items, *state["output"]]


def _not_found(response_id: str) -> ApiError:
    message = f"no response {response_id[:80]!r} is stored for this key"
    return invalid(message, code=GatewayCode.PREVIOUS_RESPONSE_NOT_FOUND, param=_PARAM)
