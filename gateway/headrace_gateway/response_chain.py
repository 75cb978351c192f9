"""Items that a request refers to instead of sending: by `previous_response_id`, and by `item_reference`."""

import re
from typing import Any, Final

import msgspec

from headrace_gateway.call import ResponseForm
from headrace_gateway.context import Gateway
from headrace_gateway.envelope import Envelope
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.input_items import Item
from headrace_gateway.keys import ApiKey
from headrace_gateway.response_replay import replay

MAX_LINKS: Final = 100
MAX_BYTES: Final = 4 * 2**20
_PARAM: Final = "previous_response_id"
_ITEM_ID: Final = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{32})_i?[0-9]{1,6}")
_ENCODE: Final = msgspec.json.Encoder().encode


async def read_history(gateway: Gateway, key: ApiKey, previous: Any) -> list[Item]:
    """Return the items of the chain that ends with this response, oldest first.

    Raises ApiError 400 if a response is missing, is another key's or is not finished, and if there are too many.
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
        assert isinstance(envelope.form, ResponseForm)
        previous = envelope.form.config[_PARAM]
    return [item for items in reversed(links) for item in items]


async def with_references(gateway: Gateway, key: ApiKey, given: Any) -> Any:
    """Return `input` with the items that its references name. Anything else is returned unchecked.

    Raises ApiError 400 if an item is not stored, and if the items or their responses are too many or too large.
    """
    if not isinstance(given, list):
        return given
    known: dict[str, dict[str, Item]] = {}
    read, named_size = _Size("the responses whose items input refers to"), _Size("the items that input refers to")
    found = []
    for position, item in enumerate(given):
        if not isinstance(item, dict) or item.get("type") != "item_reference":
            found.append(item)
            continue
        path = f"input[{position}].id"
        match = _ITEM_ID.fullmatch(str(item.get("id")))
        response_id = f"resp_{match[1]}" if match is not None else ""
        if response_id and response_id not in known:
            if len(known) == MAX_LINKS:
                raise invalid(f"input must refer to items of at most {MAX_LINKS} responses", param=path)
            known[response_id] = await _items_by_id(gateway, key, response_id)
            read.add(list(known[response_id].values()), path)
        named = known.get(response_id, {}).get(str(item.get("id")))
        if named is None:
            raise invalid("no item with this id is stored: send the item itself", code="item_not_found", param=path)
        named_size.add(named, path)  # every time: the chat's messages repeat the text
        found.append(named)
    return found


class _Size:
    """The bytes of what was read so far, encoded as JSON.

    Args:
        what: the subject of the error.
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
    if not isinstance(envelope.form, ResponseForm):
        raise _not_found(response_id)
    return envelope


async def _items(gateway: Gateway, envelope: Envelope) -> list[Item]:
    """Return the input and the output of one response."""
    items = await gateway.responses.input_items(envelope.id)
    if items is None:
        raise _not_found(envelope.id)
    state = await gateway.responses.state(envelope.id)
    if state is None:
        stream = await replay(gateway.redis, envelope)
        if stream is None:
            raise _not_found(envelope.id)
        if not stream.has_ended:
            message = f"the response {envelope.id!r} is not finished: wait until it ends, or cancel it"
            raise invalid(message, code="previous_response_not_finished", param=_PARAM)
        state = stream.state()
    return [*items, *state["output"]]


def _not_found(response_id: str) -> ApiError:
    message = f"no response {response_id[:80]!r} is stored for this key"
    return invalid(message, code="previous_response_not_found", param=_PARAM)
