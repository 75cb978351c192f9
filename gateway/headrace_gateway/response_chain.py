"""What `previous_response_id` stands for: the items of the responses that a new one continues."""

from collections.abc import Iterator
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
_ENCODE: Final = msgspec.json.Encoder().encode


async def read_history(gateway: Gateway, key: ApiKey, previous: Any) -> list[Item]:
    """The items of the chain that ends with this response, the oldest first.

    Raises ApiError 400 where a link is not kept, is another key's, or is not finished, and where there are too many.
    """
    links: list[list[Item]] = []
    size = 0
    while isinstance(previous, str):
        if len(links) == MAX_LINKS:
            raise invalid(f"{_PARAM} must continue at most {MAX_LINKS} responses", param=_PARAM)
        envelope = await _envelope(gateway, key, previous)
        items = await _items(gateway, envelope)
        size += len(_ENCODE(items))
        if size > MAX_BYTES:
            message = f"the responses that {_PARAM} continues must have at most {MAX_BYTES} bytes: begin anew"
            raise invalid(message, param=_PARAM)
        links.append(items)
        assert isinstance(envelope.form, ResponseForm)
        previous = envelope.form.config[_PARAM]
    return list(_joined(links))


def _joined(links: list[list[Item]]) -> Iterator[Item]:
    for items in reversed(links):
        yield from items


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
    """The input and the output of one response."""
    items = await gateway.responses.input_items(envelope.id)
    if items is None:
        raise _not_found(envelope.id)
    state = await gateway.responses.state(envelope.id)
    if state is None:
        stream = await replay(gateway.redis, envelope)
        if stream is None:
            raise _not_found(envelope.id)
        if not stream.has_ended:
            message = f"the response {envelope.id!r} is not finished: wait for its end, or cancel it"
            raise invalid(message, code="previous_response_not_finished", param=_PARAM)
        state = stream.state()
    return [*items, *state["output"]]


def _not_found(response_id: str) -> ApiError:
    message = f"no response {response_id[:80]!r} is stored"
    return invalid(message, code="previous_response_not_found", param=_PARAM)
