"""Ids of answers and of the objects in them. The latter are derived, so that every replica gives the same ones."""

import hashlib
import secrets


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed: a prefix such as `chatcmpl-` or `resp_`, and 128 random bits."""
    return f"{prefix}{secrets.token_hex(16)}"


def call_id(completion_id: str, choice: int, call: int) -> str:
    """Return the id of a tool call."""
    seed = f"{completion_id}/{choice}/{call}".encode()
    return f"call_{hashlib.blake2b(seed, digest_size=12).hexdigest()}"


def item_id(kind: str, response_id: str, place: int | str) -> str:
    """Return the id of an item, such as `msg_<digits of the response>_0`. It shows which response contains the item."""
    return f"{kind}_{response_id.rpartition('_')[2]}_{place}"
