"""Ids that the gateway gives out. Those within an answer are derived, so that every replica gives the same."""

import hashlib
import secrets


def new_id(prefix: str) -> str:
    """An id that nobody can guess: 128 random bits behind a prefix such as `chatcmpl-` or `resp_`."""
    return f"{prefix}{secrets.token_hex(16)}"


def call_id(completion_id: str, choice: int, call: int) -> str:
    """The id of a tool call."""
    seed = f"{completion_id}/{choice}/{call}".encode()
    return f"call_{hashlib.blake2b(seed, digest_size=12).hexdigest()}"


def item_id(kind: str, response_id: str, place: int | str) -> str:
    """The id of an item of a response, such as `msg_<digits of the response>_0`: it tells where the item is kept."""
    return f"{kind}_{response_id.rpartition('_')[2]}_{place}"
