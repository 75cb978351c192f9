"""The model's tokenizer as the engine uses it: text or chat to ids, ids to text."""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from headrace_engine.checkpoint import pretrained_source
from headrace_engine.config import EngineConfig
from headrace_engine.errors import InvalidRequestError, ModelLoadError


class ModelTokenizer:
    """A fast (Rust) tokenizer with its chat template.

    Raises:
        ModelLoadError: the folder has no tokenizer, or only a slow one.
    """

    def __init__(self, model: str, *, trust_remote_code: bool = False) -> None:
        source, options = pretrained_source(model)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
        except (OSError, ValueError, ImportError) as error:
            raise ModelLoadError(f"model {model!r} has no usable tokenizer: {error}") from error
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ModelLoadError(f"the tokenizer of {model!r} has no tokenizer.json, which streaming text needs")
        self.backend: Tokenizer = backend

    @cached_property
    def longest_token_chars(self) -> int:
        """No token stands for more characters of text than this."""
        return max((len(token) for token in self.backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Without the special tokens that a prompt gets."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
        """Apply the chat template; returns its text and ids, ready for the assistant's turn.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequestError("the model has no chat template: send a prompt instead of messages")
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs of the model's authors and raise what they like
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error}") from error
        # The template writes the special tokens itself.
        return text, self.encode_plain(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """With special tokens."""
        return self.backend.decode(list(token_ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """The content of `tokenizer.json`, with the tokens that the tokenizer's configuration adds."""
        plain = copy(self.backend)
        plain.no_padding()
        plain.no_truncation()
        return plain.to_str()

    def decode_token(self, token_id: int) -> str:
        return self.backend.decode([token_id], skip_special_tokens=False)


def tokenizer_json(config: EngineConfig) -> str:
    """What the core needs of the tokenizer: `EngineConfig.tokenizer` names this function."""
    return ModelTokenizer(config.model.model, trust_remote_code=config.model.trust_remote_code).to_json()
