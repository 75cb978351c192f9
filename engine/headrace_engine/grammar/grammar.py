"""Grammars: which tokens may follow an output. Only this module, `source` and `errors` use llguidance.

Imports no torch: the core computes the token masks for all runners.
"""

import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headrace_engine.grammar.errors import DeadEndError, GrammarError, TooComplexError, failure, sentence
from headrace_engine.grammar.source import after_thought, closing_tag, grammar_source
from headrace_engine.grammar.text_tokens import as_text
from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams
from headrace_engine.system.heap import release_freed_heap

# Limits of one mask: about ten times what large real schemas need, and a tenth of the library's limits. With the
# library's limits, a hostile grammar takes almost a second for one mask.
_STEP_LEXER_FUEL = 50_000
_STEP_MAX_ITEMS = 10_000
# An automaton gets more states with the text that it matches. It is replaced when it has this many.
_MAX_LEXER_STATES = 10_000
# A text with `maxLength` takes a state per byte. An automaton for a replay gets this many more per byte of output.
_LEXER_STATES_PER_BYTE = 1.5
# A request fails if its own automaton is full after fewer tokens, or a smaller share of its tokens. Each new automaton
# replays all tokens, so these limits bound how often a token is replayed.
_MIN_TOKENS_PER_AUTOMATON = 8
_MIN_SHARE_OF_TOKENS = 1 / 128
# New outputs share an automaton until it has matched this many tokens. Usually it is not full by then, so few outputs
# must change to another one.
_MAX_SHARED_TOKENS = 2000
# A request that resumes with more tokens gets its own automaton: its replay could fill a shared one.
_MAX_SHARED_REPLAY = 1000
# A replay takes this many tokens at a time. It releases the GIL after this many bytes, about 0.3 ms.
_REPLAY_TOKENS = 8
_REPLAY_BYTES_PER_PAUSE = 64
_REPLAY_PAUSE_SECONDS = 0.0001
# After this many bytes, a replay computes a mask, which renews the fuel of the lexer. By then half of the fuel is used.
_REPLAY_BYTES_PER_MASK = 2048
# A trial of a grammar ends after this many tokens or this much processor time. A slow grammar does not fail it.
_TRIAL_TOKENS = 64
_TRIAL_SECONDS = 0.1
# A compiled grammar takes up to 600 times the memory of its source.
_MAX_CACHED_SOURCE_BYTES = 256 * 1024
_MAX_CACHED_GRAMMARS = 32
# A template writes at most this many tokens from the tag that opens a thought to the end of the prompt.
_OPENING_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerDefinition:
    """The properties of the tokenizer and the model that a grammar needs."""

    tokenizer_json: bytes
    """The content of `tokenizer.json` in UTF-8, including added tokens."""
    vocab_size: int
    """Vocabulary size of the model. Masks cover the larger of the vocabularies of the model and the tokenizer."""
    eos_token_ids: Sequence[int]


@dataclass(slots=True, eq=False)
class _Automaton:
    """A compiled grammar with the states that its copies have created and share.

    The library limits the number of states of all copies together. At the limit, every copy fails permanently.
    """

    matcher: LLMatcher
    tokenizer: LLTokenizer
    is_shared: bool
    num_tokens: int = 0
    """Tokens matched by all copies."""
    failed: bool = False

    @property
    def is_used_up(self) -> bool:
        return self.failed or self.num_tokens >= _MAX_SHARED_TOKENS


class Grammar:
    """A grammar with the state of one output.

    Positions count tokens. Not thread-safe, but copies may be used in several threads.
    """

    __slots__ = ("_automaton", "_matcher", "may_share_again", "num_tokens")

    def __init__(self, automaton: _Automaton, *, may_share_again: bool) -> None:
        self._automaton = automaton
        self._matcher = automaton.matcher.deep_copy()
        self.may_share_again = may_share_again
        """Whether the output may continue in another shared automaton if this one fails."""
        self.num_tokens = 0
        """Number of tokens that the output has matched with this automaton, without replayed ones."""

    def has_failed_early(self, num_tokens: int) -> bool:
        """Whether an output has filled an automaton of its own with very few tokens."""
        fewest = max(_MIN_TOKENS_PER_AUTOMATON, num_tokens * _MIN_SHARE_OF_TOKENS)
        return not self._automaton.is_shared and self.num_tokens < fewest

    def copy(self) -> "Grammar":
        copied = Grammar(self._automaton, may_share_again=self.may_share_again)
        copied._matcher = self._matcher.deep_copy()
        return copied

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens of the output.

        Raises:
            GrammarError: a token is not allowed at its position, or the automaton is full.
        """
        self._consume(token_ids)
        self.num_tokens += len(token_ids)

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance to the end of an output, and check that it can continue. Raises GrammarError, as `accept` does."""
        since_pause = since_mask = 0
        for start in range(0, len(token_ids), _REPLAY_TOKENS):
            if since_pause >= _REPLAY_BYTES_PER_PAUSE:
                time.sleep(_REPLAY_PAUSE_SECONDS)
                since_pause = 0
            if since_mask >= _REPLAY_BYTES_PER_MASK:
                self._bitmask()
                since_mask = 0
            some = token_ids[start : start + _REPLAY_TOKENS]
            self._consume(some)
            num_bytes = _num_bytes(self._automaton.tokenizer, some)
            since_pause, since_mask = since_pause + num_bytes, since_mask + num_bytes
        self._bitmask()

    def bitmasks(self, draft_token_ids: Sequence[int] = ()) -> list[bytes]:
        """Return the tokens that may come next, and after each of the draft tokens. Does not change the state.

        Returns:
            One mask for each position, 1 + drafts in all, of `ceil(vocab_size / 32) * 4` bytes. Bit i of byte j stands
            for token 8 j + i. After a draft that is not allowed, the masks repeat, because they will not be used. After
            a draft that no token may follow, the masks allow nothing.

        Raises:
            GrammarError: no token may come next, or the automaton is full.
        """
        mask = self._bitmask()
        if not draft_token_ids:
            return [mask]
        # On a copy: a draft that leads to a dead end cannot be rolled back, and may never be drawn.
        return [mask, *self.copy()._masks_behind(draft_token_ids, mask)]

    def _masks_behind(self, draft_token_ids: Sequence[int], mask: bytes) -> list[bytes]:
        """Return the mask after each draft. `mask` is the mask before the first one. Leaves the state undefined."""
        masks: list[bytes] = []
        for token_id in draft_token_ids:
            if not self._matcher.try_consume_tokens([token_id]):
                if self._matcher.is_error():
                    raise self._failure()
                break
            if self._matcher.stop_reason() != "EndOfSentence":  # nothing may follow the end token
                try:
                    mask = self._bitmask()
                except DeadEndError:
                    mask = bytes(len(mask))
            masks.append(mask)
        return masks + [mask] * (len(draft_token_ids) - len(masks))

    def _consume(self, token_ids: Sequence[int]) -> None:
        self._automaton.num_tokens += len(token_ids)
        if not self._matcher.consume_tokens(list(token_ids)):
            raise self._failure()

    def _bitmask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error() or (self._matcher.is_stopped() and not self._matcher.is_accepting()):
            raise self._failure()
        return mask

    def _failure(self) -> GrammarError:
        error = self._matcher.get_error()
        if "NoExtension" in error:
            return DeadEndError(sentence(error))
        self._automaton.failed = True
        return failure(error)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and caches the latest ones.

    Outputs with the same grammar share an automaton, so that later outputs reuse its states. After a limited number of
    tokens, the next output gets a new automaton. If the automaton of an output is full, the output continues with
    another one. So an output can delay other outputs, but cannot fail them.
    """

    def __init__(self, definition: TokenizerDefinition) -> None:
        """Load the vocabulary. Takes about 5 us for each token and does not release the GIL.

        Raises:
            GrammarError: this kind of tokenizer is not supported.
        """
        self._tokenizer = _create_tokenizer(definition)
        self._end_tokens = sum(1 << token_id for token_id in set(definition.eos_token_ids))
        self._cache: OrderedDict[str, _Automaton] = OrderedDict()
        self._cached_bytes = 0

    def check(self, params: StructuredOutputsParams) -> None:
        """Compile a grammar, and try it with some tokens. Raises the same errors as `compile`.

        The tokens are needed because nested repetitions compile quickly, and exceed the limits of masks or states only
        later. Nothing is cached, so that the memory for later grammars is always the same.
        """
        grammar = Grammar(self._create(grammar_source(params), _MAX_LEXER_STATES), may_share_again=False)
        mask = grammar.bitmasks()[0]
        token_ids: list[int] = []
        deadline = time.thread_time() + _TRIAL_SECONDS
        while len(token_ids) < _TRIAL_TOKENS and time.thread_time() < deadline:
            allowed = int.from_bytes(mask, "little") & ~self._end_tokens
            if not allowed:
                return
            token_ids.append(allowed.bit_length() - 1)
            try:
                grammar.accept(token_ids[-1:])
                mask = grammar.bitmasks()[0]
            except TooComplexError:
                grammar = self.compile(params, token_ids, grammar)
                mask = grammar.bitmasks()[0]
            except GrammarError:  # a dead end, or a token that the mask allowed only because no other token fits
                return

    def compile(
        self,
        params: StructuredOutputsParams,
        token_ids: Sequence[int] = (),
        failed: Grammar | None = None,
        *,
        prompt_token_ids: Sequence[int] = (),
    ) -> Grammar:
        """Return a grammar, advanced by the tokens of an output.

        Args:
            prompt_token_ids: if this prompt ends with an opened thought, the grammar begins after the thought.
            failed: the previous grammar of the output, which has raised GrammarError.

        Raises:
            GrammarError: the grammar is malformed, uses an unsupported feature, is too complex, or cannot be satisfied,
                or the tokens do not satisfy it.
        """
        source = self.source(params, prompt_token_ids)
        if len(token_ids) <= _MAX_SHARED_REPLAY and (failed is None or failed.may_share_again):
            grammar = Grammar(self._shared(source), may_share_again=failed is None)
            with suppress(GrammarError):  # other outputs may have filled the shared automaton
                grammar.replay(token_ids)
                return grammar
        elif failed is not None and failed.has_failed_early(len(token_ids)):
            raise GrammarError("the grammar is too complex where the output is")
        num_bytes = _num_bytes(self._tokenizer, token_ids)
        automaton = self._create(source, _MAX_LEXER_STATES + int(num_bytes * _LEXER_STATES_PER_BYTE))
        grammar = Grammar(automaton, may_share_again=False)
        grammar.replay(token_ids)
        return grammar

    def source(self, params: StructuredOutputsParams, prompt_token_ids: Sequence[int]) -> str:
        """Return the grammar of an output in llguidance's notation. It begins after a thought that the prompt opens.

        Raises GrammarError if the grammar cannot be expressed.
        """
        source = grammar_source(params)
        closing = closing_tag(self._tokenizer.decode_str(list(prompt_token_ids[-_OPENING_TOKENS:])))
        if closing is None:
            return source
        ids = self._tokenizer.tokenize_str(closing)
        is_token = len(ids) == 1 and self._tokenizer.is_special_token(ids[0])
        return after_thought(source, closing, ids[0] if is_token else None)

    def _shared(self, source: str) -> _Automaton:
        automaton = self._cache.get(source)
        if automaton is not None and not automaton.is_used_up:
            self._cache.move_to_end(source)
            return automaton
        self._drop(source)
        automaton = self._create(source, _MAX_LEXER_STATES, is_shared=True)
        Grammar(automaton, may_share_again=False).bitmasks()
        self._cache[source] = automaton
        self._cached_bytes += len(source)
        while self._cached_bytes > _MAX_CACHED_SOURCE_BYTES or len(self._cache) > _MAX_CACHED_GRAMMARS:
            self._drop(next(iter(self._cache)))
        return automaton

    def _drop(self, source: str) -> None:
        if self._cache.pop(source, None) is not None:
            self._cached_bytes -= len(source)

    def _create(self, source: str, max_lexer_states: int, *, is_shared: bool = False) -> _Automaton:
        limits = LLParserLimits(
            initial_lexer_fuel=200_000,
            step_lexer_fuel=_STEP_LEXER_FUEL,
            step_max_items=_STEP_MAX_ITEMS,
            max_lexer_states=max_lexer_states,
            max_grammar_size=50_000,
            verbose_errors=False,  # the grammar's state may be logged
        )
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(sentence(matcher.get_error()))
        return _Automaton(matcher, self._tokenizer, is_shared=is_shared)


def _num_bytes(tokenizer: LLTokenizer, token_ids: Sequence[int]) -> int:
    return len(tokenizer.decode_bytes(list(token_ids)))


def _create_tokenizer(definition: TokenizerDefinition) -> LLTokenizer:
    end = list(definition.eos_token_ids)
    with open(os.memfd_create("tokenizer"), "wb") as file:  # noqa: PTH123  # a text would take five times the memory
        file.write(as_text(definition.tokenizer_json))
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"
        try:
            try:
                return LLTokenizer(path, n_vocab=definition.vocab_size, eos_token=end)
            except ValueError as error:
                if "vocab size too small" not in str(error):
                    raise
                # The tokenizer has more tokens than the model. The masks then cover all tokens of the tokenizer.
                return LLTokenizer(path, eos_token=end)
        except ValueError as error:
            raise GrammarError(f"the model's tokenizer cannot be used with grammars: {sentence(str(error))}") from error
        finally:
            release_freed_heap()
