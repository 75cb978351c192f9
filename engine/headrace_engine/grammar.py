"""Grammars: which tokens may follow, given those that are there. The only module that knows llguidance.

Imports no torch: the core masks tokens for every runner alike.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from headrace_engine.errors import HeadraceEngineError
from headrace_engine.structured_outputs_params import StructuredOutputsParams

# About ten times what large real schemas need, and a tenth of the library's own limits: with those a hostile grammar
# takes most of a second for one mask. Error texts without the grammar's state, since they may be logged.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=10_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
_MAX_ERROR_CHARS = 300
# A compiled grammar takes up to 600 times the memory of its source.
_MAX_CACHED_SOURCE_BYTES = 256 * 1024
_MAX_CACHED_GRAMMARS = 256


class GrammarError(HeadraceEngineError):
    """A grammar cannot be compiled, or cannot go on; the sentence says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerDefinition:
    """What a grammar must know of the tokenizer and its model."""

    tokenizer_json: str
    """The content of `tokenizer.json`, added tokens included."""
    vocab_size: int
    """Of the model; masks are as wide as it or as the tokenizer's vocabulary, whichever is larger."""
    eos_token_ids: Sequence[int]


class Grammar:
    """A grammar and how far one output has come in it.

    Positions count tokens. Not thread-safe by itself; copies are independent of each other.
    """

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> "Grammar":
        return Grammar(self._matcher.deep_copy())

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens of the output.

        Raises:
            GrammarError: one of them is not allowed where it stands, or the grammar became too complex.
        """
        if not self._matcher.consume_tokens(list(token_ids)):
            raise GrammarError(self._error())

    def bitmasks(self, draft_token_ids: Sequence[int] = ()) -> list[bytes]:
        """Which tokens may come next, and which behind each of the drafted tokens. Leaves the state as it is.

        Returns:
            One mask a position, 1 + drafts of them: `ceil(vocab_size / 32) * 4` bytes, bit i of byte j stands for token
            8 j + i. Behind a draft that is not allowed the masks repeat, as nothing there will be used; behind one that
            leads to nowhere they are empty.

        Raises:
            GrammarError: nothing may come next, or the grammar became too complex.
        """
        mask = self._bitmask()
        if not draft_token_ids:
            return [mask]
        # A copy, as no rollback leads out of a dead end; and the draft that leads there may never be drawn.
        return [mask, *self.copy()._masks_behind(draft_token_ids, mask)]

    def _masks_behind(self, draft_token_ids: Sequence[int], mask: bytes) -> list[bytes]:
        """One mask behind each draft, `mask` being the one before them. Leaves the state anywhere."""
        masks: list[bytes] = []
        for token_id in draft_token_ids:
            if not self._matcher.try_consume_tokens([token_id]):
                break
            if not self._has_ended():  # nothing follows the end token
                try:
                    mask = self._bitmask()
                except GrammarError:
                    mask = bytes(len(mask))
            masks.append(mask)
        return masks + [mask] * (len(draft_token_ids) - len(masks))

    def _has_ended(self) -> bool:
        return self._matcher.stop_reason() == "EndOfSentence"

    def _bitmask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error() or (self._matcher.is_stopped() and not self._matcher.is_accepting()):
            raise GrammarError(self._error())
        return mask

    def _error(self) -> str:
        return _sentence(self._matcher.get_error())


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the latest ones."""

    def __init__(self, definition: TokenizerDefinition) -> None:
        """Takes about 5 us a token of the vocabulary, without giving other threads a turn.

        Raises:
            GrammarError: the tokenizer is of no known kind.
        """
        self._tokenizer = _create_tokenizer(definition)
        self._cache: OrderedDict[str, Grammar] = OrderedDict()
        self._cached_bytes = 0

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """A grammar at its beginning.

        Raises:
            GrammarError: it is malformed, uses what is not supported, is too complex, or no text satisfies it.
        """
        source = _source(params)
        cached = self._cache.get(source)
        if cached is not None:
            self._cache.move_to_end(source)
            return cached.copy()
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_sentence(matcher.get_error()))
        grammar = Grammar(matcher)
        grammar.copy().bitmasks()
        self._keep(source, grammar)
        return grammar.copy()

    def _keep(self, source: str, grammar: Grammar) -> None:
        self._cache[source] = grammar
        self._cached_bytes += len(source)
        while self._cached_bytes > _MAX_CACHED_SOURCE_BYTES or len(self._cache) > _MAX_CACHED_GRAMMARS:
            oldest, _ = self._cache.popitem(last=False)
            self._cached_bytes -= len(oldest)


def _create_tokenizer(definition: TokenizerDefinition) -> LLTokenizer:
    end = list(definition.eos_token_ids)
    try:
        try:
            return LLTokenizer(definition.tokenizer_json, n_vocab=definition.vocab_size, eos_token=end)
        except ValueError as error:
            if "vocab size too small" not in str(error):
                raise
            # The tokenizer knows tokens that the model does not; masks are as wide as its vocabulary then.
            return LLTokenizer(definition.tokenizer_json, eos_token=end)
    except ValueError as error:
        raise GrammarError(f"the model's tokenizer cannot be used with grammars: {_sentence(str(error))}") from error


def _source(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own notation."""
    try:
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.choice is not None:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
            return LLMatcher.grammar_from_lark(f"start: {texts}")
        if params.grammar is not None:
            return grammar_from("grammar", params.grammar)
        return LLMatcher.grammar_from_json_schema(
            '{"type": "object"}' if params.json is None else params.json,
            overrides={
                "lenient": False,
                "whitespace_flexible": not params.disable_any_whitespace,
                "whitespace_pattern": params.whitespace_pattern,
            },
        )
    except (ValueError, RecursionError) as error:
        raise GrammarError(_sentence(str(error))) from error


def _sentence(error: str) -> str:
    """The library's words in one line of bounded length."""
    if "NoExtension" in error:
        return "no text satisfies it"
    line = re.sub(r"\s+", " ", error.replace("<non-verbose/>", "")).strip()
    return line if len(line) <= _MAX_ERROR_CHARS else line[:_MAX_ERROR_CHARS] + "..."
