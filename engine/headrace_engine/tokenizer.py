"""The model's tokenizer as the engine uses it: text or chat to ids, ids to text.

Imports no torch, and transformers only for chats, so that a process which computes nothing starts quickly and stays
small. `tokenizer_loader` reads the parts, with both.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from tokenizers import Tokenizer

from headrace_engine.errors import InvalidRequestError
from headrace_engine.prompt_length import PromptLength
from headrace_engine.tokenizer_parts import TokenizerParts


class ModelTokenizer:
    """A fast (Rust) tokenizer with its chat template."""

    def __init__(self, parts: TokenizerParts) -> None:
        self.backend: Tokenizer = Tokenizer.from_str(parts.tokenizer_json)
        self.backend.encode_special_tokens = parts.split_special_tokens
        self._chat_template = parts.chat_template
        self._special_tokens = parts.special_tokens
        self._prompt_length: PromptLength | None = None

    def refuse_longer_than(self, max_tokens: int) -> None:
        """From now on refuse a text that is far too long without tokenising all of it."""
        self._prompt_length = PromptLength(self.backend, max_tokens)

    def encode(self, text: str) -> list[int]:
        """Raises ContextLengthError: it is longer than `refuse_longer_than` allows."""
        self._check_length(text)
        return self.backend.encode(text, add_special_tokens=True).ids

    def encode_plain(self, text: str) -> list[int]:
        """Without the special tokens that a prompt gets; errors as `encode`."""
        self._check_length(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def _check_length(self, text: str) -> None:
        if self._prompt_length is not None:
            self._prompt_length.check(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
        """Apply the chat template; returns its text and ids, ready for the assistant's turn.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        if not self._chat_template:
            raise InvalidRequestError("the model has no chat template: send a prompt instead of messages")
        try:
            text = self._render_chat(self._chat_template, messages)
        except Exception as error:  # templates are programs of the model's authors and raise what they like
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error}") from error
        # The template writes the special tokens itself.
        return text, self.encode_plain(text)

    def _render_chat(self, template: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """As transformers' `apply_chat_template`, which leaves out what is None, too."""
        conversation = [{name: value for name, value in message.items() if value is not None} for message in messages]
        texts, _ = _chat_templates().render_jinja_template(
            [conversation], chat_template=template, add_generation_prompt=True, **self._special_tokens
        )
        text: str = texts[0]
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """With special tokens."""
        return self.backend.decode(list(token_ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        return self.backend.to_str()

    def decode_token(self, token_id: int) -> str:
        return self.backend.decode([token_id], skip_special_tokens=False)


def create_tokenizer(model: str, parts: TokenizerParts, *, trust_remote_code: bool = False) -> ModelTokenizer:
    """The tokenizer of these parts; read once more from the model, torch and all, where they do not suffice."""
    if not parts.has_own_methods:
        return ModelTokenizer(parts)
    loader = import_module("headrace_engine.tokenizer_loader")
    whole = loader.read_tokenizer(model, trust_remote_code=trust_remote_code)
    tokenizer: ModelTokenizer = loader.OwnMethodsTokenizer(parts, whole)
    return tokenizer


def import_chat_templates() -> None:
    """Import what the first chat needs, which takes a second: for a moment when nothing waits for this process."""
    _chat_templates()


def _chat_templates() -> Any:
    return import_module("transformers.utils.chat_template_utils")
