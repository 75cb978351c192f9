"""A tokenizer for the fake runner's 61 tokens: one character each, and the end token."""

from __future__ import annotations

import json

from headrace_engine.text.tokenizer_parts import TokenizerParts
from unit.engine.fake_runner import EOS, VOCAB_SIZE

CHARACTERS = '0123456_789abcdefghijklmnopqrstuvwxyzABCDEFGHIJ{}[]":,.-+!?%&'
assert len(CHARACTERS) == VOCAB_SIZE


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(char) for char in text]


def decode(token_ids: list[int]) -> str:
    return "".join("" if token_id == EOS else CHARACTERS[token_id] for token_id in token_ids)


def load_tokenizer(_: object) -> TokenizerParts:
    """What `EngineConfig.tokenizer` names for a core on the fake runner."""
    return TokenizerParts(tokenizer_json=tokenizer_json().encode(), special_tokens={"eos_token": "<eos>"})


def tokenizer_json() -> str:
    vocab = {char if index != EOS else "<eos>": index for index, char in enumerate(CHARACTERS)}
    end = {"id": EOS, "content": "<eos>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{**end, **flags}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": vocab,
                "merges": [],
            },
        }
    )
