"""The parts of a tokenizer, as the process of the core sends them to its clients."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """The data that is needed to encode and decode as transformers does, without its tokenizer class."""

    tokenizer_json: bytes
    """The content of `tokenizer.json` in UTF-8, with the tokens that the configuration of the tokenizer adds.

    A text of Python would take four times the memory."""
    chat_template: str | None = None
    """The template for a chat without tools."""
    tool_chat_template: str | None = None
    """The template for a chat with tools, if it differs."""
    special_tokens: dict[str, str]
    """Special tokens by their names in templates, such as bos_token."""
    eos_token_id: int | None = None
    """The end token in the configuration of the tokenizer."""
    split_special_tokens: bool = False
    """Whether special tokens in a text are treated as plain text."""
    has_own_methods: bool = False
    """Whether the tokenizer's class has its own way to encode, so that these parts do not suffice."""
