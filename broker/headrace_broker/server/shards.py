"""The shards of a stream server that is a Redis Cluster. Does no I/O.

A command may name keys of one slot only. So the keys of a request have a tag, and all keys with one tag have one slot.
With a tag of its own for each request, a reader would need a connection for each stream; 16 tags need 16.

To the rest of this package a shard is a home like any other stream server: the home `s1{s07}` is the shard `{s07}` of
the server `s1`. The table of the stream servers knows only the server.
"""

import hashlib
from typing import Final

SHARDS: Final = tuple(f"{{s{number:02d}}}" for number in range(16))
"""The tags, which Redis hashes to slots."""


def shard_of(request_id: str) -> str:
    """Return the tag of a request's keys. The rule is in docs/wire.md."""
    digest = hashlib.sha1(request_id.encode(errors="surrogatepass"), usedforsecurity=False).hexdigest()
    return SHARDS[int(digest[0], 16)]


def server_of(home: str) -> str:
    """Return the name of the stream server that has this home."""
    return home.partition("{")[0]


def key_prefix(home: str) -> str:
    """Return what precedes a request id in the keys of this home: `{s07}:`; empty unless the home is a shard."""
    _, brace, rest = home.partition("{")
    return f"{brace}{rest}:" if brace else ""


def id_in_keys(home: str, request_id: str) -> str:
    """Return the id that the keys of a request contain at this home, for `keys.stream_key` and the like."""
    return key_prefix(home) + request_id
