"""JSON for formats of lines, server-sent events and JSON Lines: no reader finds the end of a line inside it."""

from typing import Any, Final

import msgspec

_ENCODE: Final = msgspec.json.Encoder().encode
_LINE_ENDS: Final = {character.encode(): b"\\u%04x" % ord(character) for character in "\x85\u2028\u2029"}
"""What str.splitlines() takes for the end of a line, and so do clients. JSON itself escapes those below U+0020."""


def encode_line(value: Any) -> bytes:
    """UTF-8, without an end of its own."""
    encoded = _ENCODE(value)
    if not encoded.isascii():
        for character, escape in _LINE_ENDS.items():
            encoded = encoded.replace(character, escape)
    return encoded
