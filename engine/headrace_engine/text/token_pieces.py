"""The bytes that single tokens add to a text.

A decoder of Hugging Face's `tokenizers` returns only text, with U+FFFD for a part of a character. The bytes show
whether a token is a part of a character, whole characters or an actual U+FFFD.
"""

import codecs
import json
import re
from functools import cached_property
from typing import Any, Final, TypeAlias

from tokenizers import Tokenizer

Piece: TypeAlias = str | bytes
"""Text if the bytes are complete characters, otherwise the bytes."""

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_EACH_BYTE: Final = "headrace_engine.each_byte"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR: Final = "a"
"""A text that is decoded before a token, so that the token is not the first one."""
_JOINING: Final = frozenset({"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"})


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TokenPieces:
    """The pieces of the tokens of one tokenizer, with a cache.

    Most decoders concatenate the pieces of tokens (`joins` is true). Then no piece depends on other tokens, except that
    the first token may lose its leading space. For other decoders, the piece of a token is only its decoded text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._decoder: Any = tokenizer.decoder
        steps = [] if self._decoder is None else _steps(json.loads(self._decoder.__getstate__()))
        kinds = {step["type"] for step in steps}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._spaces_are_between = self._decoder is None or "WordPiece" in kinds
        self._errors = _EACH_BYTE if self._has_byte_tokens else "replace"
        self._pieces: dict[int, Piece] = {}
        self.joins = all(_joins(step) for step in steps) and not (self._is_byte_level and kinds - {"ByteLevel", "Fuse"})

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """The texts of the tokens that were added to the vocabulary, including special ones."""
        return {token_id: token.content for token_id, token in self.tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        added = self.tokenizer.get_added_tokens_decoder().items()
        return frozenset(token_id for token_id, token in added if token.special)

    def __contains__(self, token_id: int) -> bool:
        return self.tokenizer.id_to_token(token_id) is not None

    def __getitem__(self, token_id: int) -> Piece:
        """Return the piece that the token adds after other tokens. It is empty for an unknown token."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._look_up(token_id)
        return piece

    def first(self, token_id: int) -> Piece:
        """Return the piece that the token adds at the start of a text."""
        piece = self[token_id]
        token = self.tokenizer.id_to_token(token_id)
        if token is None or isinstance(piece, bytes) or self._is_byte_level or not self.joins:
            return piece
        return self._decode([token])

    def alone(self, token_id: int) -> str:
        """Return the text of a single token. A leading space stays if it is the token's, not if decoding added it."""
        piece = self.first(token_id) if self._spaces_are_between else self[token_id]
        return piece if isinstance(piece, str) else self.decode(piece, final=True)[0]

    def decode(self, data: bytes, *, final: bool = False) -> tuple[str, bytes]:
        """Decode bytes, with U+FFFD for invalid ones. Return the text, and the bytes of an incomplete last character.

        Args:
            final: no more bytes will follow, so none are kept.
        """
        text, num_used = codecs.utf_8_decode(data, self._errors, final)
        return text, data[num_used:]

    def num_replacements(self, data: bytes) -> int:
        """Return how many U+FFFD a decoder shows for an incomplete character."""
        return len(self.decode(data, final=True)[0])

    def _look_up(self, token_id: int) -> Piece:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        if not self.joins:
            return self.tokenizer.decode([token_id], skip_special_tokens=False)
        if self._is_byte_level:
            return _as_piece(_byte_level_bytes(token))
        byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if byte is not None:
            return _as_piece(bytes.fromhex(byte[1]))
        return self._decode([_ANCHOR, token])[len(self._decode([_ANCHOR])) :]

    def _decode(self, tokens: list[str]) -> str:
        text: str = " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)
        return text


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the components of a decoder, from the JSON of the tokenizer."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _joins(step: dict[str, Any]) -> bool:
    """Whether this decoder processes each token or character independently."""
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    if step["type"] == "Strip":
        return bool(step["stop"] == 0)
    return step["type"] in _JOINING


def _as_piece(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each of GPT-2's characters stands for.

    A printable character stands for its own byte. The characters from U+0100 on stand for the other bytes.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_LEVEL_ALPHABET: Final = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token. A token with a character outside the alphabet is plain text, as for the library."""
    try:
        return bytes([_BYTE_LEVEL_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()
