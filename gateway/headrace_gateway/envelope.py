"""The envelope: what every replica must know to write the answer of a request that another replica accepted.

It is written to Redis before the request is submitted, and read by whatever replica a client rejoins.
"""

from typing import Final

import msgspec

from headrace_gateway.call import AnswerForm

VERSION: Final = 1
"""Raised when answers written by an older replica would differ: a replica refuses a version that it does not know."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it was accepted. `id` is OpenAI's, such as `chatcmpl-...`, and the first request's in the queue."""

    id: str
    request_ids: tuple[str, ...]
    """One a prompt, in the order of the choices."""
    created: int
    """Unix seconds."""
    model: str
    key: str
    """Name of the API key that owns the request."""
    tenant: str | None
    form: AnswerForm
    version: int = VERSION
