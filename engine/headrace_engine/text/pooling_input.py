"""`PoolingTokenizer`: texts, pairs of texts and token ids become the inputs of a pooling model.

Checks everything that can be checked without the model, and reports all problems at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tokenizers import Encoding

from headrace_engine.errors import ContextLengthError, InvalidRequestError
from headrace_engine.requests.pooling_params import PoolingParams
from headrace_engine.requests.pooling_request import PoolingTask
from headrace_engine.runner.contracts import PoolingInfo
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_wire.values import is_integer, is_unicode, shown

Pair = tuple[str, str]

_CUTS: Final[Mapping[PoolingTask, str]] = {"classify": "longest_first", "score": "only_second"}
"""Which text of a pair is cut: the longer one, token by token, or the second one. An embedding has no pairs."""
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
        tokenizer: of the model. Its settings change from call to call, so that it is not thread-safe.
        info: what the model takes.
    """

    def __init__(self, tokenizer: ModelTokenizer, info: PoolingInfo, vocab_size: int) -> None:
        self.info = info
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend
        self._backend.no_truncation()  # the file of a tokenizer may set both, for other programs
        self._backend.no_padding()
        self._vocab_size = vocab_size

    def tokenize(
        self, task: PoolingTask, inputs: Sequence[Any], params: PoolingParams, *, max_total: int | None = None
    ) -> TokenizedInputs:
        """Tokenise inputs: all texts or pairs of texts, or all lists of token ids.

        Args:
            max_total: tokens of all inputs together, after they are cut.

        Raises:
            InvalidRequestError: names every problem, at most eight of the inputs.
            ContextLengthError: inputs are too long, and there is no other problem.
        """
        check = _Problems("documents" if task == "score" else "input")
        for problem in self._option_problems(params):
            check.add(problem)
        kinds = [self._kind(index, one, check) for index, one in enumerate(inputs)]
        if "ids" in kinds and {"text", "pair"} & set(kinds):
            check.add("input holds text and token ids: use one kind")
        if not inputs:
            check.add("input must hold at least one text or list of token ids")
        if task not in _CUTS and "pair" in kinds:
            check.add(f"input[{kinds.index('pair')}] is a pair of texts, which has no embedding: send two texts")
        check.done()
        limit = params.max_tokens or self.info.max_input_tokens
        if "ids" in kinds:
            found = self._take_ids(inputs, limit, params, check)
        else:
            found = self._tokenize(task, inputs, self._prompt(params), limit, params, check)
        total = sum(map(len, found.inputs))
        if max_total is not None and total > max_total:
            check.add(f"the inputs have {total} tokens, at most {max_total} are taken")
        check.done()
        return found

    def _option_problems(self, params: PoolingParams) -> Iterator[str]:
        info, own, asked = self.info, self.info.dimensions, params.dimensions
        if params.prompt_name is not None and params.prompt_name not in info.prompts:
            known = f"has {', '.join(info.prompts)}" if info.prompts else "has none"
            yield f"prompt_name {params.prompt_name!r} is unknown; this model {known}"
        if params.max_tokens is not None and params.max_tokens > info.max_input_tokens:
            yield f"max_tokens must be at most {info.max_input_tokens}, the model's limit, got {params.max_tokens}"
        if asked is None or asked == own:
            return
        if asked > own:
            yield f"dimensions must be 1 to {own}, got {asked}"
        elif info.matryoshka_dimensions and asked not in info.matryoshka_dimensions:
            known = ", ".join(map(str, sorted({*info.matryoshka_dimensions, own}, reverse=True)))
            yield f"dimensions must be one of {known}, got {asked}"
        elif not info.matryoshka_dimensions and not info.takes_any_dimensions:
            yield f"dimensions must be {own} or absent, got {asked}: this model was not trained for fewer"

    def _prompt(self, params: PoolingParams) -> str:
        """Return the text before each input."""
        if params.prompt is not None:
            return params.prompt
        name = self.info.default_prompt_name if params.prompt_name is None else params.prompt_name
        return "" if name is None else self.info.prompts[name]

    def _kind(self, index: int, one: Any, check: "_Problems") -> str:
        if isinstance(one, str):
            if not one:
                check.at(index, "must not be empty")
            elif self.info.renders_pairs:
                check.at(index, "must be a pair of texts: the model scores a query and a document")
            elif not is_unicode(one):
                check.at(index, "must be valid Unicode text, got a lone surrogate")
            return "text"
        if isinstance(one, Sequence) and not isinstance(one, bytes):
            if not one:
                check.at(index, "must not be empty")
                return "ids"
            if len(one) == 2 and all(isinstance(text, str) for text in one):
                if not all(one) or not all(map(is_unicode, one)):
                    check.at(index, "must be two texts of valid Unicode that are not empty")
                return "pair"
            wrong = next((token for token in one if not is_integer(token) or not 0 <= token < self._vocab_size), None)
            if wrong is not None:
                check.at(index, f"must hold token ids of 0 to {self._vocab_size - 1}, got {shown(wrong)}")
            return "ids"
        check.at(index, f"must be text, a pair of texts, or a list of token ids, got a {type(one).__name__}")
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
        self,
        task: PoolingTask,
        inputs: Sequence[Any],
        prompt: str,
        limit: int,
        params: PoolingParams,
        check: "_Problems",
    ) -> TokenizedInputs:
        special = params.add_special_tokens and not self.info.renders_pairs
        excluded = 0 if self.info.pools_prompt or not prompt else self._prompt_tokens(prompt, special=special)
        found = TokenizedInputs(inputs=[], second_from=[], num_prompt_tokens=excluded)
        rendered = [self._rendered(one, prompt) for one in inputs]
        encodings = self._backend.encode_batch(rendered, add_special_tokens=special)
        for index, (given, text, encoding) in enumerate(zip(inputs, rendered, encodings, strict=True)):
            own = encoding
            if len(own.ids) > limit:
                if params.truncate == "error":
                    check.too_long(index, len(own.ids), limit)
                    continue
                found.truncated.append(index)
                direction = "right" if params.truncate == "end" else "left"
                if self.info.renders_pairs:
                    shortened = self._cut_document(given, prompt, limit, direction)
                else:
                    shortened = self._cut(text, limit, direction, _CUTS.get(task, "longest_first"), special=special)
                if shortened is None:
                    check.too_long_at(index, f"has a query that leaves no room for the document in {limit} tokens")
                    continue
                own = shortened
            if len(own.ids) <= excluded:
                check.at(index, "has no tokens beside the prompt")
            found.inputs.append(own.ids)
            found.second_from.append(own.type_ids.index(1) if 1 in own.type_ids else 0)
        if not any(found.second_from):
            found.second_from = []
        return found

    def _rendered(self, one: Any, prompt: str) -> Any:
        if self.info.renders_pairs:
            query, document = one
            return self._tokenizer.rendered_pair(query, document, prompt)
        return prompt + one if isinstance(one, str) else (prompt + one[0], one[1])

    def _prompt_tokens(self, prompt: str, *, special: bool) -> int:
        """Return the number of tokens of the prompt alone, without a special token at its end."""
        ids = self._backend.encode(prompt, add_special_tokens=special).ids
        return len(ids) - (1 if ids and ids[-1] in self._tokenizer.special_ids else 0)

    def _cut(self, text: str | Pair, limit: int, direction: str, strategy: str, *, special: bool) -> Encoding | None:
        """Tokenise a text or pair that is too long. Return None if its first text alone is too long."""
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
    """Collects the problems of inputs, and raises them together.

    Args:
        name: of the inputs, in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: list[str] = []
        self._too_long: list[str] = []

    def add(self, problem: str) -> None:
        self._found.append(problem)

    def at(self, index: int, problem: str) -> None:
        """Add a problem of one input."""
        self.add(f"{self._name}[{index}] {problem}")

    def too_long_at(self, index: int, problem: str) -> None:
        """Add an input that is too long for the model."""
        self._too_long.append(f"{self._name}[{index}] {problem}")

    def too_long(self, index: int, tokens: int, limit: int) -> None:
        self.too_long_at(index, f'has {tokens} tokens, the model takes {limit}: send less text, or truncate: "end"')

    def done(self) -> None:
        """Raise the error for all problems, if there are any."""
        problems = self._found + self._too_long
        more = len(problems) - _MOST_PROBLEMS
        if more > 0:
            problems[_MOST_PROBLEMS:] = [f"and {more} more inputs have problems"]
        if problems:
            raise InvalidRequestError(problems) if self._found else ContextLengthError(problems)
