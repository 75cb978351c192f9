"""What a tokenizer consists of, as it travels from the core's process to the doors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """Enough to encode and decode as transformers would, without its tokenizer class."""

    tokenizer_json: str
    """The content of `tokenizer.json`, with the tokens that the tokenizer's configuration adds."""
    chat_template: str | None = None
    """The template of a chat without tools."""
    tool_chat_template: str | None = None
    """The template of a chat with tools, where it is another one."""
    special_tokens: dict[str, str]
    """By the names that templates have for them, such as bos_token."""
    eos_token_id: int | None = None
    """The token that the tokenizer's configuration names as the end of a text."""
    split_special_tokens: bool = False
    """Whether a special token that stands in a text is read as plain text."""
    has_own_methods: bool = False
    """Whether the tokenizer's class encodes in a way of its own: then these parts do not suffice."""
