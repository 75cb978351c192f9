"""Reads a tokenizer with transformers, whose `AutoTokenizer` imports torch.

The process of the core uses it, because it imports torch anyway. It sends the parts to other processes.
"""

import importlib.util
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headrace_engine.checkpoints.checkpoint import is_gguf, pretrained_source, quick_reads
from headrace_engine.errors import ModelLoadError
from headrace_engine.options.config import EngineConfig, ModelConfig
from headrace_engine.runner.memory import release_unused
from headrace_engine.text import chat_template
from headrace_engine.text.chat import ChatOptions
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_cache import TokenizerCache
from headrace_engine.text.tokenizer_json import compacted
from headrace_engine.text.tokenizer_parts import TokenizerParts

logger = logging.getLogger(__name__)

# `ModelTokenizer` replaces these methods of the plain class. A class that overrides one needs `OwnMethodsTokenizer`.
_METHODS = ("__call__", "_encode_plus", "apply_chat_template", "get_chat_template", "special_tokens_map")

_LARGE_VOCABULARY: Final = 8192
"""Smaller tokenizers are built in a moment, and not kept in the cache."""
_CACHE_VERSION: Final = 2
"""Grows when the parts of a tokenizer change."""
_SPLIT_DIGITS: Final = {"codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "smollm", "starcoder"}
"""The values of `tokenizer.ggml.pre` whose vocabularies have single digits only, as in llama.cpp's llama-vocab.cpp."""
# fmt: off
_AS_GPT2: Final = {
    "a.x-4.0", "gigachat", "gpt-2", "granite-docling", "jais", "jina-de", "jina-es", "jina-v1-en", "jina-v2-code",
    "jina-v2-de", "jina-v2-es", "mellum", "modern-bert", "mpt", "olmo", "phi-2", "roberta-bpe", "trillion",
}
# fmt: on
"""The values that stand for GPT-2's pre-tokenizer, as there."""
_HAS_GPT2S: Final = b'"pre_tokenizer":{"type":"ByteLevel"'
"""In a tokenizer.json as `Tokenizer.to_str` writes it."""


def load_tokenizer(config: EngineConfig) -> TokenizerParts:
    """Load the parts of the tokenizer. The default of `EngineConfig.tokenizer`. Raises ModelLoadError."""
    source, _ = config.model.tokenizer_source
    cache = _cache_of(source) if is_gguf(source) else None
    parts = cache.read() if cache is not None else None
    if parts is None:
        parts = parts_of(read_tokenizer_of(config.model))
        if cache is not None:
            cache.write(parts)
    if is_gguf(source) and _HAS_GPT2S in parts.tokenizer_json:
        _warn_unless_gpt2s(source)
    release_unused()  # the heap that transformers used, and the pages of a GGUF file's vocabulary
    return parts


def _cache_of(path: str) -> TokenizerCache | None:
    """Return the cache for the tokenizer of a GGUF file. None if it is small, or cannot be read."""
    from headrace_engine.checkpoints.gguf_reader import read_header  # imports gguf, which other models do not need

    try:
        header = read_header(path)
    except (OSError, ValueError, IndexError):
        return None  # transformers raises the error
    if header.num_tokens < _LARGE_VOCABULARY:
        return None
    versions = f"{_CACHE_VERSION} {transformers.__version__} {tokenizers.__version__}"
    return TokenizerCache(header.digest_of("general.", "tokenizer."), versions)


def read_tokenizer_of(model: ModelConfig) -> Any:
    """Read the tokenizer that the options of the engine name."""
    source, revision = model.tokenizer_source
    return read_tokenizer(source, trust_remote_code=model.trust_remote_code, revision=revision)


def read_tokenizer(model: str, *, trust_remote_code: bool, revision: str | None = None) -> Any:
    """Read a fast (Rust) tokenizer of transformers. Raises ModelLoadError if there is none."""
    source, options = pretrained_source(model, revision)
    try:
        with quick_reads(model):  # AutoTokenizer reads the configuration, too
            tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except (
        Exception
    ) as error:  # tokenizers raises a plain Exception for a broken file, and a folder may have its own code
        raise ModelLoadError(f"model {model!r} has no usable tokenizer: {advice(model, error)}") from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise ModelLoadError(f"the tokenizer of {model!r} has no tokenizer.json, which streaming text needs")
    if is_gguf(model):
        _split_digits(model, tokenizer.backend_tokenizer)
    return tokenizer


def _pre_tokenizer_of(path: str) -> str | None:
    """Return `tokenizer.ggml.pre` of a GGUF file, if it has one."""
    from headrace_engine.checkpoints.gguf_reader import read_header  # imports gguf, which other models do not need

    kind = read_header(path).fields.get("tokenizer.ggml.pre")
    return None if kind is None else str(kind.contents())


def _warn_unless_gpt2s(path: str) -> None:
    """Warn if a GGUF file does not ask for GPT-2's pre-tokenizer, which is what it got."""
    name = _pre_tokenizer_of(path)
    if name not in _AS_GPT2:
        found = "is missing" if name is None else f"is {name!r}, which is unknown"
        logger.warning(
            "tokenizer.ggml.pre of %s %s: GPT-2's pre-tokenizer is used, and texts may get other tokens than in "
            "llama.cpp. --tokenizer can name a folder with the model's own tokenizer.json",
            path,
            found,
        )


def _split_digits(path: str, backend: Any) -> None:
    """Split digits where the vocabulary of a GGUF file asks for it. transformers builds GPT-2's pre-tokenizer there."""
    own = backend.pre_tokenizer
    if _pre_tokenizer_of(path) not in _SPLIT_DIGITS or not isinstance(own, pre_tokenizers.ByteLevel):
        return
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), own])


def parts_of(tokenizer: Any) -> TokenizerParts:
    """Return the parts of a tokenizer. Raises ModelLoadError if one of them is code, not data."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    try:
        tokenizer_json = compacted(backend.to_str())
    except Exception as error:  # the message of tokenizers if a step is a Python object
        raise ModelLoadError(f"the tokenizer {type(tokenizer).__name__} cannot be had as JSON: {error}") from error
    template = _template(tokenizer)
    tool_template = _template(tokenizer, tools=[])
    return TokenizerParts(
        tokenizer_json=tokenizer_json,
        chat_template=template,
        tool_chat_template=tool_template if tool_template != template else None,
        special_tokens={name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        eos_token_id=tokenizer.eos_token_id,
        split_special_tokens=bool(tokenizer.split_special_tokens),
        has_own_methods=any(
            getattr(type(tokenizer), name, None) is not getattr(PreTrainedTokenizerFast, name) for name in _METHODS
        ),
    )


def _template(tokenizer: Any, **options: Any) -> str | None:
    try:
        template: str = tokenizer.get_chat_template(**options)
    except ValueError:  # there is no template, or there are several without a default
        return None
    return template


class OwnMethodsTokenizer(ModelTokenizer):
    """A tokenizer whose class has its own way to encode, for example by code in the model folder. Calls that class."""

    def __init__(self, parts: TokenizerParts, tokenizer: Any) -> None:
        super().__init__(parts)
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _render_chat(self, template: str, conversation: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        text: str = self._tokenizer.apply_chat_template(
            chat_template.for_template(template, conversation, options, self._special_tokens),
            tools=options.tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **(options.chat_template_kwargs or {}),
        )
        return text


_TIKTOKEN_LINE: Final = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+")
_OTHER_WAY: Final = "or copy tokenizer.json from the model's repository, if it has one"


def advice(model: str, error: Exception) -> str:
    """Return why the tokenizer of a model cannot be read, and what to do. `error` is transformers' exception."""
    folder = Path(model)
    if not folder.is_dir() or (folder / "tokenizer.json").exists():
        return str(error)
    if (folder / "tokenizer.model").is_file():
        kind, package = _kind_of(folder / "tokenizer.model")
        if importlib.util.find_spec(package) is None:
            return (
                f"it has no tokenizer.json, and its tokenizer.model, a {kind} file, is converted by {package}: "
                f"{sys.executable} -m pip install {package}, {_OTHER_WAY}"
            )
        return f"it has no tokenizer.json, and its tokenizer.model cannot be converted ({error}): {_OTHER_WAY[3:]}"
    if (folder / "tekken.json").is_file():
        reason = f"{type(error).__name__}: {error}"
        return f"it has no tokenizer.json, and its tekken.json cannot be converted ({reason}): {_OTHER_WAY[3:]}"
    return f"it has no tokenizer.json: {_OTHER_WAY[3:]}"


def _kind_of(file: Path) -> tuple[str, str]:
    """Return the format of a tokenizer.model, and the package that reads it."""
    with file.open("rb") as content:
        is_text = _TIKTOKEN_LINE.fullmatch(content.readline(1000).strip()) is not None
    return ("tiktoken", "tiktoken") if is_text else ("SentencePiece", "sentencepiece")
