"""The tokenizer of the model: converts text or chats to ids, and ids to text.

Imports no torch, and transformers only for chats, so that a process without a model starts fast and stays small.
`tokenizer_loader`, which imports both, reads the parts.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from headrace_engine import chat_template
from headrace_engine.chat import ChatOptions
from headrace_engine.errors import InvalidRequestError
from headrace_engine.plain_values import is_unicode
from headrace_engine.prompt_length import PromptLength
from headrace_engine.token_pieces import TokenPieces
from headrace_engine.tokenizer_parts import TokenizerParts


class ModelTokenizer:
    """A fast (Rust) tokenizer with its chat template."""

    def __init__(self, parts: TokenizerParts) -> None:
        self.backend: Tokenizer = Tokenizer.from_str(parts.tokenizer_json)
        self.backend.encode_special_tokens = parts.split_special_tokens
        self.eos_token_id = parts.eos_token_id
        self._chat_template = parts.chat_template
        self._tool_chat_template = parts.tool_chat_template
        self._special_tokens = parts.special_tokens
        self._prompt_length: PromptLength | None = None

    def refuse_longer_than(self, max_tokens: int) -> None:
        """Refuse far too long texts without tokenising all of them."""
        self._prompt_length = PromptLength(self.backend, max_tokens)

    @cached_property
    def pieces(self) -> TokenPieces:
        """The bytes that each token adds to a text."""
        return TokenPieces(self.backend)

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template of the model uses tools."""
        template = self._tool_chat_template or self._chat_template
        return template is not None and chat_template.reads_variable(template, "tools")

    def encode(self, text: str) -> list[int]:
        """Tokenise a prompt. Raises ContextLengthError if it is longer than `refuse_longer_than` allows."""
        self._check_length(text)
        return self.backend.encode(text, add_special_tokens=True).ids

    def encode_plain(self, text: str) -> list[int]:
        """Tokenise a text without the special tokens of a prompt. Raises the same errors as `encode`."""
        self._check_length(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def _check_length(self, text: str) -> None:
        if self._prompt_length is not None:
            self._prompt_length.check(text)

    def encode_chat(
        self, conversation: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> tuple[str, list[int]]:
        """Apply the chat template to messages of `read_messages`. Return the text and its ids.

        Raises:
            InvalidRequestError: there is no template, or it refuses the messages.
        """
        options = options or ChatOptions()
        own = (self._tool_chat_template if options.tools else None) or self._chat_template
        template = options.chat_template or own
        if not template:
            raise InvalidRequestError("the model has no chat template: send a prompt instead of messages")
        try:
            text = self._render_chat(template, conversation, options)
        except Exception as error:  # templates are programs of the authors of the model, and may raise anything
            if options.continue_final_message and isinstance(error, ValueError):
                raise InvalidRequestError(
                    "continue_final_message cannot be served: the last message has no text, or the chat template does "
                    "not render it as it is"
                ) from None  # the error quotes the whole conversation
            whose = "the given" if options.chat_template else "the model's"
            raise InvalidRequestError(f"{whose} chat template refuses these messages: {error}") from error
        if not is_unicode(text):
            raise InvalidRequestError("the chat template made text that is no valid Unicode")
        # The template contains the special tokens.
        return text, self.encode_plain(text)

    def _render_chat(self, template: str, conversation: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        return chat_template.rendered(template, conversation, options, self._special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Convert ids to text, including special tokens."""
        return self.backend.decode(list(token_ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        return self.backend.to_str()


class NoTokenizer(ModelTokenizer):
    """Replaces the tokenizer with `skip_tokenizer_init`. Refuses everything that needs a tokenizer."""

    def __init__(self) -> None:
        super().__init__(
            TokenizerParts(tokenizer_json=Tokenizer(WordLevel({}, unk_token="")).to_str(), special_tokens={})
        )

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise InvalidRequestError(
            "the engine was made with skip_tokenizer_init: give prompt_token_ids, and ask for nothing that needs text"
        )

    encode = encode_plain = encode_chat = to_json = _refuse


def create_tokenizer(
    model: str, parts: TokenizerParts, *, trust_remote_code: bool = False, revision: str | None = None
) -> ModelTokenizer:
    """Create the tokenizer from its parts. Read it from the model, which imports torch, if they do not suffice."""
    if not parts.has_own_methods:
        return ModelTokenizer(parts)
    loader = import_module("headrace_engine.tokenizer_loader")
    whole = loader.read_tokenizer(model, trust_remote_code=trust_remote_code, revision=revision)
    tokenizer: ModelTokenizer = loader.OwnMethodsTokenizer(parts, whole)
    return tokenizer
