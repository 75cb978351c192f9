"""Added tokens that are text: `<tool_call>` in Qwen3's tokenizer, which is not special and which outputs show."""

import json
import re
from typing import Any, Final

_TAG: Final = re.compile(r"<[!-~]*>")
"""ASCII without white space: in a byte-level vocabulary, too, such a token is written as its text."""


def as_text(tokenizer_json: str) -> str:
    """Return a tokenizer whose added tokens in angle brackets are ordinary ones unless they are special.

    llguidance takes every added token in angle brackets for a special one, and no text of a grammar matches it. A model
    that has such a token would have to write the tag letter by letter.
    """
    if not any(_is_tag(token) for token in _added_tokens(tokenizer_json)):
        return tokenizer_json
    tokenizer = json.loads(tokenizer_json)
    vocabulary, added = tokenizer["model"].get("vocab"), tokenizer["added_tokens"]
    if not isinstance(vocabulary, dict):  # the ids of a Unigram model are positions in a list
        return tokenizer_json
    # all of them: ids of the added tokens that stay would be counted from the size of the vocabulary
    vocabulary.update({token["content"]: token["id"] for token in added})
    tokenizer["added_tokens"] = [token for token in added if not _is_tag(token)]
    return json.dumps(tokenizer, ensure_ascii=False)


def _added_tokens(tokenizer_json: str) -> list[dict[str, Any]]:
    """Read them alone: the whole file may have tens of megabytes."""
    found = re.search(r'"added_tokens"\s*:\s*(?=\[)', tokenizer_json)
    added: list[dict[str, Any]] = json.JSONDecoder().raw_decode(tokenizer_json, found.end())[0] if found else []
    return added


def _is_tag(token: dict[str, Any]) -> bool:
    return not token.get("special") and _TAG.fullmatch(token["content"]) is not None
