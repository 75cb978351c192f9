"""The content of `tokenizer.json`, in the form that takes the least memory to parse."""

import re
from typing import Final

_MERGES: Final = b'"merges":[['
_PAIR: Final = re.compile(rb'\["((?:[^"\\]|\\.)*)","((?:[^"\\]|\\.)*)"\]')
_COMMENT: Final = b'["#version'
"""In the old form, the tokenizers library takes a merge that begins like this for a comment."""


def compacted(tokenizer_json: str) -> bytes:
    """Write the merges of a BPE tokenizer in their old form, `"a b"` instead of `["a", "b"]`.

    The tokenizers library reads both. To parse the old form, it takes a quarter of the memory: 72 instead of 270 MB
    for the 515,000 merges of Gemma 3. Nothing changes if a merge has a space, which the old form cannot express.

    Args:
        tokenizer_json: as `Tokenizer.to_str` writes it.
    """
    content = tokenizer_json.encode()
    start = content.find(_MERGES)  # in a token, the quotes would be escaped
    merges = content[start:]  # they are at the end
    if start < 0 or b" " in merges or _COMMENT in merges:
        return content
    return content[:start] + _PAIR.sub(rb'"\1 \2"', merges)
