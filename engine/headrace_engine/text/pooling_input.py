"""`PoolingTokenizer`: texts, pairs of texts and token ids become the inputs of a pooling model.

Checks everything that can be checked without the model, and reports all problems at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tokenizers import Encoding, Tokenizer

from headrace_engine.errors import InvalidRequestError
from headrace_engine.requests.pooling_params import PoolingParams
from headrace_engine.runner.contracts import PoolingInfo
from headrace_engine.text import chat_template
from headrace_engine.text.tokenizer_parts import TokenizerParts
from headrace_wire.values import is_integer, is_unicode, shown

Pair = tuple[str, str]
Cut = Literal["longest_first", "only_second"]
"""Which text of a pair is cut: the longer one, token by token, or the second one."""

_MOST_PROBLEMS: Final = 8


@dataclass(slots=True, kw_only=True)
class TokenizedInputs:
    """See `PoolingCoreRequest` for the first three."""

    inputs: list[list[int]]
    second_from: list[int]
    num_prompt_tokens: int
    truncated: list[int] = field(default_factory=list)
    """Indices of the inputs that were cut."""


class PoolingTokenizer:
    """
    Args:
        parts: the tokenizer of the model.
        info: what the model takes.
        renders_pairs: whether a pair is rendered by the chat template, with the roles query and document.

    Not thread-safe: the settings of the tokenizer change from call to call.
    """

    def __init__(self, parts: TokenizerParts, info: PoolingInfo, vocab_size: int, *, renders_pairs: bool) -> None:
        self._backend: Tokenizer = Tokenizer.from_buffer(parts.tokenizer_json)
        self._info = info
        self._vocab_size = vocab_size
        self._special_tokens = parts.special_tokens
        self._template = parts.chat_template if renders_pairs else None
        self._special_ids = {self._backend.token_to_id(token) for token in parts.special_tokens.values()}

    def tokenize(self, inputs: Sequence[Any], params: PoolingParams, cut: Cut | None = None) -> TokenizedInputs:
        """Tokenise inputs: all texts or pairs of texts, or all lists of token ids.

        Args:
            cut: how pairs are cut. None: pairs are refused.

        Raises:
            InvalidRequestError: names every problem, at most eight of the inputs.
        """
        prompt = self._prompt(params)
        check = _Problems()
        kinds = [self._kind(index, one, check) for index, one in enumerate(inputs)]
        if "ids" in kinds and {"text", "pair"} & set(kinds):
            check.add("input holds text and token ids: use one kind")
        if not inputs:
            check.add("input must hold at least one text or list of token ids")
        if cut is None and "pair" in kinds:
            check.add(f"input[{kinds.index('pair')}] is a pair of texts, which has no embedding: send two texts")
        check.done()
        limit = min(params.max_tokens or self._info.max_input_tokens, self._info.max_input_tokens)
        if "ids" in kinds:
            found = self._take_ids(inputs, limit, params, check)
        else:
            found = self._tokenize(inputs, prompt, limit, params, cut, check)
        check.done()
        return found

    def _prompt(self, params: PoolingParams) -> str:
        """Return the text before each input."""
        if params.prompt is not None:
            return params.prompt
        prompts = self._info.prompts
        name = self._info.default_prompt_name if params.prompt_name is None else params.prompt_name
        if name is None:
            return ""
        if name not in prompts:
            known = f"this model has {', '.join(prompts)}" if prompts else "this model has none"
            raise InvalidRequestError(f"prompt_name {name!r} is unknown; {known}")
        return prompts[name]

    def _kind(self, index: int, one: Any, check: "_Problems") -> str:
        if isinstance(one, str):
            if not one:
                check.add(f"input[{index}] must not be empty")
            elif self._template is not None:
                check.add(f"input[{index}] must be a pair of texts: the model scores a query and a document")
            elif not is_unicode(one):
                check.add(f"input[{index}] must be valid Unicode text, got a lone surrogate")
            return "text"
        if isinstance(one, Sequence) and not isinstance(one, bytes):
            if not one:
                check.add(f"input[{index}] must not be empty")
                return "ids"
            if len(one) == 2 and all(isinstance(text, str) for text in one):
                if not all(one) or not all(map(is_unicode, one)):
                    check.add(f"input[{index}] must be two texts of valid Unicode that are not empty")
                return "pair"
            wrong = next((token for token in one if not is_integer(token) or not 0 <= token < self._vocab_size), None)
            if wrong is not None:
                check.add(f"input[{index}] must hold token ids of 0 to {self._vocab_size - 1}, got {shown(wrong)}")
            return "ids"
        check.add(f"input[{index}] must be text, a pair of texts, or a list of token ids, got a {type(one).__name__}")
        return "text"

    def _take_ids(
        self, inputs: Sequence[Any], limit: int, params: PoolingParams, check: "_Problems"
    ) -> TokenizedInputs:
        found = TokenizedInputs(inputs=[], second_from=[], num_prompt_tokens=0)
        for index, given in enumerate(inputs):
            ids = list(given)
            if len(ids) > limit:
                if params.truncate == "error":
                    check.too_long(index, len(ids), limit)
                found.truncated.append(index)
                ids = ids[:limit] if params.truncate == "end" else ids[-limit:]
            found.inputs.append(ids)
        return found

    def _tokenize(
        self, inputs: Sequence[Any], prompt: str, limit: int, params: PoolingParams, cut: Cut | None, check: "_Problems"
    ) -> TokenizedInputs:
        special = params.add_special_tokens and self._template is None
        excluded = 0 if self._info.pools_prompt or not prompt else self._prompt_tokens(prompt, special=special)
        found = TokenizedInputs(inputs=[], second_from=[], num_prompt_tokens=excluded)
        rendered = [self._rendered(one, prompt) for one in inputs]
        self._backend.no_truncation()
        encodings = self._backend.encode_batch(rendered, add_special_tokens=special)
        for index, (given, text, encoding) in enumerate(zip(inputs, rendered, encodings, strict=True)):
            own = encoding
            if len(own.ids) > limit:
                if params.truncate == "error":
                    check.too_long(index, len(own.ids), limit)
                    continue
                found.truncated.append(index)
                direction = "right" if params.truncate == "end" else "left"
                if self._template is None:
                    shortened = self._cut(text, limit, direction, cut, special=special)
                else:
                    shortened = self._cut_document(given, prompt, limit, direction)
                if shortened is None:
                    check.add(f"input[{index}] has a query that leaves no room for the document in {limit} tokens")
                    continue
                own = shortened
            if len(own.ids) <= excluded:
                check.add(f"input[{index}] has no tokens beside the prompt")
            found.inputs.append(own.ids)
            found.second_from.append(own.type_ids.index(1) if 1 in own.type_ids else 0)
        if not any(found.second_from):
            found.second_from = []
        return found

    def _rendered(self, one: Any, prompt: str) -> Any:
        if self._template is None:
            return prompt + one if isinstance(one, str) else (prompt + one[0], one[1])
        query, document = one
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if prompt:
            messages.insert(0, {"role": "system", "content": prompt})
        return chat_template.rendered_pair(self._template, messages, self._special_tokens)

    def _prompt_tokens(self, prompt: str, *, special: bool) -> int:
        """Return the number of tokens of the prompt alone, without a special token at its end."""
        self._backend.no_truncation()
        ids = self._backend.encode(prompt, add_special_tokens=special).ids
        return len(ids) - (1 if ids and ids[-1] in self._special_ids else 0)

    def _cut(self, text: str | Pair, limit: int, direction: str, cut: Cut | None, *, special: bool) -> Encoding | None:
        """Tokenise a text or pair that is too long. Return None if its first text alone is too long."""
        strategy = "longest_first" if cut is None else cut
        self._backend.enable_truncation(limit, strategy=strategy, direction=direction)
        texts: Any = (text,) if isinstance(text, str) else text
        try:
            return self._backend.encode(*texts, add_special_tokens=special)
        except Exception:  # noqa: BLE001  # tokenizers raises a plain Exception
            return None
        finally:
            self._backend.no_truncation()

    def _cut_document(self, pair: Pair, prompt: str, limit: int, direction: str) -> Encoding | None:
        """Cut the document before the chat template is rendered, so that the end of the template stays."""
        query, document = pair
        tokens = self._backend.encode(document, add_special_tokens=False)
        kept = len(tokens.ids)
        encoding = self._backend.encode(self._rendered(pair, prompt), add_special_tokens=False)
        while len(encoding.ids) > limit and kept > 1:
            kept = max(1, kept - (len(encoding.ids) - limit))
            if direction == "right":
                document = pair[1][: tokens.offsets[kept - 1][1]]
            else:
                document = pair[1][tokens.offsets[len(tokens.ids) - kept][0] :]
            encoding = self._backend.encode(self._rendered((query, document), prompt), add_special_tokens=False)
        return encoding if len(encoding.ids) <= limit else None


class _Problems:
    """Collects the problems of inputs, and raises them together."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, problem: str) -> None:
        self._found.append(problem)

    def too_long(self, index: int, tokens: int, limit: int) -> None:
        self.add(f'input[{index}] has {tokens} tokens, the model takes {limit}: send less text, or truncate: "end"')

    def done(self) -> None:
        """Raise InvalidRequestError if there are problems."""
        more = len(self._found) - _MOST_PROBLEMS
        if more > 0:
            self._found[_MOST_PROBLEMS:] = [f"and {more} more inputs have problems"]
        if self._found:
            raise InvalidRequestError(self._found)


def check_dimensions(info: PoolingInfo, dimensions: int | None) -> None:
    """Refuse a length of embeddings that the model was not trained for. Raises InvalidRequestError."""
    if dimensions is None or dimensions == info.dimensions:
        return
    if dimensions > info.dimensions:
        raise InvalidRequestError(f"dimensions must be 1 to {info.dimensions}, got {dimensions}")
    if info.matryoshka_dimensions and dimensions not in info.matryoshka_dimensions:
        known = ", ".join(map(str, sorted({*info.matryoshka_dimensions, info.dimensions}, reverse=True)))
        raise InvalidRequestError(f"this model has the dimensions {known}, not {dimensions}")
    if not info.matryoshka_dimensions and not info.takes_any_dimensions:
        raise InvalidRequestError(f"this model was not trained for fewer dimensions than {info.dimensions}")
