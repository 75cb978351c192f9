"""How large one request of the queue may be.

A request far larger than its model's context cannot run. It is refused before it is stored: moving a message of 5 MB
blocks Redis for 20 ms.
"""

from typing import Any, Final

import msgspec

from headrace_broker import RegisteredModel
from headrace_gateway.errors import invalid
from headrace_gateway.requests.call import Call
from headrace_wire.codes import ErrorCode

OWN_BYTES: Final = 256 * 2**10
"""Allowed besides the prompt, for example for tools and grammars."""
TOKEN_BYTES: Final = 64
"""Allowed per token of the context. Most tokens have 3 to 8 bytes; only long runs of spaces or line ends have more."""
_ENCODE: Final = msgspec.msgpack.Encoder(enc_hook=str).encode


def encoded_bytes(value: Any) -> int:
    """Return how many bytes the value takes in msgpack."""
    return len(_ENCODE(value))


def request_bytes(call: Call, model: RegisteredModel) -> int:
    """Return the bytes of all requests of a call. Raises ApiError 400 if one is far larger than the model's context."""
    sizes = [encoded_bytes(request) for request in call.requests]
    limit = OWN_BYTES + TOKEN_BYTES * model.max_model_len
    if (size := max(sizes)) > limit:
        raise invalid(
            f"a request for this model must have at most {limit} bytes, got {size}: its context has"
            f" {model.max_model_len} tokens",
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        )
    return sum(sizes)
