"""Makes added tokens that outputs show as text known to llguidance, such as `<tool_call>` in Qwen3's tokenizer."""

import json
import re
from typing import Any, Final

_TAG: Final = re.compile(r"<[!-~]*>")
"""Only ASCII without white space: such a token is its own text even in a byte-level vocabulary."""


def as_text(tokenizer_json: bytes) -> bytes:
    """Return a tokenizer in which added tokens in angle brackets are ordinary tokens, unless they are special.

    llguidance takes every added token in angle brackets for a special one, and no text in a grammar matches a special
    token. Without this function, a model could write such a tag only letter by letter.
    """
    if not any(_is_tag(token) for token in _added_tokens(tokenizer_json)):
        return tokenizer_json
    tokenizer = json.loads(tokenizer_json)
    vocabulary, added = tokenizer["model"].get("vocab"), tokenizer["added_tokens"]
    if not isinstance(vocabulary, dict):  # a Unigram model has a list, whose positions are the ids: nothing to add
        return tokenizer_json
    # also the added tokens that stay: otherwise their ids would be counted from the new size of the vocabulary
    vocabulary.update({token["content"]: token["id"] for token in added})
    tokenizer["added_tokens"] = [token for token in added if not _is_tag(token)]
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def _added_tokens(tokenizer_json: bytes) -> list[dict[str, Any]]:
    """Parse only the added tokens: the whole file may have tens of megabytes."""
    found = re.search(rb'"added_tokens"\s*:\s*(?=\[)', tokenizer_json)
    if found is None:
        return []
    model = tokenizer_json.find(b'"model":', found.end())  # in a token, the quotes would be escaped
    text = tokenizer_json[found.end() : model if model >= 0 else None].decode()
    added: list[dict[str, Any]] = json.JSONDecoder().raw_decode(text)[0]
    return added


def _is_tag(token: dict[str, Any]) -> bool:
    return not token.get("special") and _TAG.fullmatch(token["content"]) is not None
