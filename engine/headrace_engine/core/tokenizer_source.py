"""The model's tokenizer as the core needs it: for its clients, and for grammars. Imports no torch."""

import zlib
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from headrace_engine.core.runner_factory import load_tokenizer
from headrace_engine.errors import HeadraceEngineError
from headrace_engine.grammar.grammar import GrammarCompiler, TokenizerDefinition
from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.text.tokenizer_parts import TokenizerParts


class TokenizerSource:
    """Loads the tokenizer at the first use. Keeps it, compressed, until the grammar compiler has been created."""

    def __init__(self, config: EngineConfig, model_info: ModelInfo) -> None:
        self._config = config
        self._model_info = model_info
        self._parts: TokenizerParts | None = None
        self._has_compiler = False

    def describe(self) -> "Future[Any]":
        """Return the `TokenizerParts` as plain data, or the reason why there are none."""
        described: Future[Any] = Future()
        try:
            parts = load_tokenizer(self._config)
        except HeadraceEngineError as error:
            described.set_exception(error)
        else:
            if not self._has_compiler:
                self._parts = replace(parts, tokenizer_json=zlib.compress(parts.tokenizer_json, level=1))
            described.set_result(asdict(parts))
        return described

    def create_grammar_compiler(self) -> GrammarCompiler:
        """Create the compiler for this tokenizer. Raises ModelLoadError if the model has no usable tokenizer."""
        self._has_compiler = True
        kept, self._parts = self._parts, None
        if kept is None:
            parts = load_tokenizer(self._config)
        else:
            parts = replace(kept, tokenizer_json=zlib.decompress(kept.tokenizer_json))
        return GrammarCompiler(
            TokenizerDefinition(
                tokenizer_json=parts.tokenizer_json,
                vocab_size=self._model_info.vocab_size,
                eos_token_ids=self._model_info.with_end_token(parts.eos_token_id).eos_token_ids,
            )
        )
