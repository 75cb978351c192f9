"""The tokenizer of the model: converts text or chats to ids, and ids to text.

Imports no torch, and transformers only for chats, so that a process without a model starts fast and stays small.
`tokenizer_loader` reads the `TokenizerParts` and imports both. `tokenizer_factory` creates the tokenizer of a model.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from headrace_engine.errors import ContextLengthError, InvalidRequestError
from headrace_engine.system.heap import release_freed_heap
from headrace_engine.text import chat_template
from headrace_engine.text.chat import ChatOptions
from headrace_engine.text.token_pieces import TokenPieces
from headrace_engine.text.tokenizer_parts import TokenizerParts
from headrace_wire.values import is_unicode


class ModelTokenizer:
    """A fast (Rust) tokenizer with its chat template."""

    def __init__(self, parts: TokenizerParts) -> None:
        self.backend: Tokenizer = Tokenizer.from_buffer(parts.tokenizer_json)
        self._compressed_json = zlib.compress(parts.tokenizer_json, level=1)  # writing it again would take seconds
        release_freed_heap()  # parsing takes twice the memory of the result
        self.backend.encode_special_tokens = parts.split_special_tokens
        self.eos_token_id = parts.eos_token_id
        self._chat_template = parts.chat_template
        self._tool_chat_template = parts.tool_chat_template
        self._special_tokens = parts.special_tokens
        self._prompt_length: PromptLength | None = None

    def refuse_longer_than(self, max_tokens: int) -> None:
        """Refuse texts that are far longer than `max_tokens`, without tokenising all of their text."""
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

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_template)

    def learn_history_forms(self) -> None:
        """Find the forms of tool calls that the model's chat templates take, so that the first chat need not do it."""
        tokens = tuple(sorted(self._special_tokens.items()))
        with_tools = self._tool_chat_template or self._chat_template
        for template, has_tools in ((self._chat_template, False), (with_tools, True)):
            if template:
                chat_template.history_form(template, tokens, has_tools=has_tools)

    def encode(self, text: str) -> list[int]:
        """Tokenise a prompt. Raises ContextLengthError if it is longer than `refuse_longer_than` allows."""
        self._check_length(text)
        return self.backend.encode(text, add_special_tokens=True).ids

    def encode_plain(self, text: str) -> list[int]:
        """Tokenise a text without the special tokens of a prompt. Raises the same errors as `encode`."""
        self._check_length(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    @property
    def start_ids(self) -> list[int]:
        """The prompt for an empty text: the special tokens of every prompt, else the start token or the end token."""
        start = self._special_tokens.get("bos_token")
        start_id = self.backend.token_to_id(start) if isinstance(start, str) else None
        start_id = self.eos_token_id if start_id is None else start_id
        return self.encode("") or ([] if start_id is None else [start_id])

    def _check_length(self, text: str) -> None:
        if self._prompt_length is not None:
            self._prompt_length.check(text)

    def encode_chat(
        self, conversation: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> tuple[str, list[int]]:
        """Apply the chat template to messages of `read_messages`. Return the text and its ids.

        Raises the errors of `render_chat`.
        """
        text = self.render_chat(conversation, options)
        return text, self.encode_plain(text)  # the template contains the special tokens

    def render_chat(self, conversation: Sequence[Mapping[str, Any]], options: ChatOptions | None = None) -> str:
        """Apply the chat template to messages of `read_messages`. Return the text.

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
        except Exception as error:  # templates are programs by the model's authors, and may raise anything
            if options.continue_final_message and isinstance(error, ValueError):
                raise InvalidRequestError(
                    "continue_final_message cannot be served: the last message has no text, or the chat template does "
                    "not render it as it is"
                ) from None  # the error quotes the whole conversation
            whose = "the given" if options.chat_template else "the model's"
            raise InvalidRequestError(f"{whose} chat template refuses these messages: {error}") from error
        if not is_unicode(text):
            raise InvalidRequestError("the chat template made text that is no valid Unicode")
        return text

    @property
    def special_ids(self) -> set[int | None]:
        """The ids of the special tokens that have a name, such as the end token."""
        return {self.backend.token_to_id(token) for token in self._special_tokens.values()}

    def rendered_pair(self, query: str, document: str, prompt: str) -> str:
        """Render a pair by the model's chat template, without a turn of the assistant."""
        if not self._chat_template:
            raise InvalidRequestError("the model renders pairs of texts, but has no chat template")
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if prompt:
            messages.insert(0, {"role": "system", "content": prompt})
        return chat_template.rendered_pair(self._chat_template, messages, self._special_tokens)

    def _render_chat(self, template: str, conversation: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        return chat_template.rendered(template, conversation, options, self._special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Convert ids to text, including special tokens."""
        return self.backend.decode(list(token_ids), skip_special_tokens=False)

    def to_json(self) -> bytes:
        """The content of `tokenizer.json` in UTF-8."""
        return zlib.decompress(self._compressed_json)


class NoTokenizer(ModelTokenizer):
    """Replaces the tokenizer with `skip_tokenizer_init`. Refuses everything that needs a tokenizer."""

    def __init__(self) -> None:
        super().__init__(
            TokenizerParts(tokenizer_json=Tokenizer(WordLevel({}, unk_token="")).to_str().encode(), special_tokens={})
        )

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise InvalidRequestError(
            "the engine was made with skip_tokenizer_init: give prompt_token_ids, and ask for nothing that needs text"
        )

    encode = encode_plain = encode_chat = to_json = _refuse


_CHARS_A_TOKEN = 16
_LEAST_CHARS = 1 << 14
# A text is refused if its beginning alone has more than this many times the allowed tokens. The rest of the text may
# change the boundaries of tokens in the beginning, and so their number, but it cannot halve the number.
_TOO_MANY = 2
# With these, the tokens of the beginning of a text do not depend on the rest, except for the last few characters.
_LOCAL_NORMALISERS = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Strip",
    "StripAccents",
}  # fmt: skip


class PromptLength:
    """Checks the length of texts by tokenising only their beginnings.

    Args:
        max_tokens: maximum tokens of prompt and output.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._looked_at = max(_CHARS_A_TOKEN * max_tokens, _LEAST_CHARS)
        added = tokenizer.get_added_tokens_decoder().values()
        self._last_chars = 2 * max((len(token.content) for token in added), default=0) + 1024
        self._is_local = tokenizer.normalizer is None or _is_local(json.loads(tokenizer.normalizer.__getstate__()))

    def check(self, text: str) -> None:
        """Raise ContextLengthError if the text certainly has too many tokens. Takes no time for a short text."""
        counted = self._looked_at - self._last_chars
        if not self._is_local or len(text) < 2 * self._looked_at or counted <= 0:
            return
        found = self._tokenizer.encode(text[: self._looked_at], add_special_tokens=False)
        num_tokens = sum(end <= counted for _, end in found.offsets)
        if num_tokens > _TOO_MANY * self._max_tokens:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, the first {counted} of which are {num_tokens} tokens: "
                f"this model's maximum context length is {self._max_tokens} tokens, prompt and output together"
            )


def _is_local(normaliser: dict[str, object]) -> bool:
    """Whether the tokens of a beginning do not depend on the rest of the text, except for its last characters."""
    if normaliser["type"] == "Sequence":
        parts = normaliser["normalizers"]
        assert isinstance(parts, list)
        return all(_is_local(part) for part in parts)
    if normaliser["type"] == "Replace":  # a regular expression may match up to the end of the text
        pattern = normaliser["pattern"]
        return isinstance(pattern, dict) and isinstance(pattern.get("String"), str) and len(pattern["String"]) < 256
    return normaliser["type"] in _LOCAL_NORMALISERS
