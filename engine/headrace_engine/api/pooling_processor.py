"""Checks and tokenises the inputs of a pooling model. All checks that need the model are here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace_engine.errors import ContextLengthError, InvalidRequestError
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_wire.pooling import MAX_INPUT_TOKENS, MAX_ROW_BYTES, PoolingTask

Truncate = Literal["error", "start", "end"]
Input = str | tuple[str, str] | list[int]
"""A text, a pair of texts, or token ids, which are the whole input."""
_SHOWN_PROBLEMS = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOptions:
    """How the inputs of one message are tokenised."""

    prompt: str | None = None
    """The text before each text."""
    prompt_name: str | None = None
    """The model's prompt of this name before each text. None: the model's default prompt, if it has one."""
    dimensions: int | None = None
    truncate: Truncate = "error"
    """What is cut off an input that is too long. Of a pair, only the second text is cut."""
    max_tokens: int | None = None
    """Tokens of one input. None: as many as the model takes."""
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenisedInputs:
    """The inputs of a message as the core takes them; see `PoolingCoreRequest`."""

    inputs: list[list[int]]
    second_from: list[int]
    num_prompt_tokens: int
    truncated: list[int]
    """Indices of the inputs that were cut."""


class PoolingProcessor:
    """Checks and tokenises inputs for one loaded model.

    Args:
        model_info: its `pooling` is set.
    """

    def __init__(self, model_info: ModelInfo, tokenizer: ModelTokenizer) -> None:
        assert model_info.pooling is not None
        self.info = model_info.pooling
        self._vocab_size = model_info.vocab_size
        self._backend = tokenizer.backend
        self._backend.no_truncation()  # the file of a tokenizer may set both, for other programs
        self._backend.no_padding()

    def tokenise(self, task: PoolingTask, inputs: Sequence[Input], options: PoolingOptions) -> TokenisedInputs:
        """Check and tokenise the inputs of one message.

        Raises:
            InvalidRequestError: it names every problem. A `ContextLengthError` if inputs are only too long.
        """
        problems = [*self._option_problems(task, len(inputs), options)]
        if problems:
            raise InvalidRequestError(problems)
        work = _Tokenising(self, task, options, self._prompt(task, options))
        for index, item in enumerate(inputs):
            work.add(index, item)
        work.raise_problems()
        skipped = 0 if self.info.pools_prompt or not work.prompt else len(self._backend.encode(work.prompt).ids) - 1
        second = work.second_from if any(work.second_from) else []
        return TokenisedInputs(
            inputs=work.inputs, second_from=second, num_prompt_tokens=skipped, truncated=work.truncated
        )

    def _option_problems(self, task: PoolingTask, count: int, options: PoolingOptions) -> Iterator[str]:
        info, prompts = self.info, self.info.prompts
        if options.prompt_name is not None and options.prompt_name not in prompts:
            known = f"has {', '.join(prompts)}" if prompts else "has no prompts"
            yield f"prompt_name {options.prompt_name!r} is unknown: this model {known}"
        if options.max_tokens is not None and options.max_tokens > info.max_input_tokens:
            yield f"max_tokens must be at most {info.max_input_tokens}, the model's limit, got {options.max_tokens}"
        if options.dimensions is not None and (problem := self._dimensions_problem(options.dimensions)):
            yield problem
        width = 1 if task == "score" else options.dimensions or info.dimensions
        size = count * width * _FLOAT_BYTES
        if size > MAX_ROW_BYTES:
            yield (
                f"{count} rows of {width} numbers are {size} bytes, at most {MAX_ROW_BYTES} are answered: send fewer"
                " inputs, or ask for fewer dimensions"
            )

    def _dimensions_problem(self, asked: int) -> str | None:
        own, trained = self.info.dimensions, self.info.matryoshka_dimensions
        if asked > own:
            return f"dimensions must be 1 to {own}, got {asked}"
        if asked == own or asked in trained or (self.info.takes_any_dimensions and not trained):
            return None
        if trained:
            return f"this model has the dimensions {', '.join(map(str, trained))}, not {asked}"
        return f"this model was not trained for fewer dimensions than {own}, got {asked}"

    def _prompt(self, task: PoolingTask, options: PoolingOptions) -> str:
        if task != "embed":
            return ""
        if options.prompt is not None:
            return options.prompt
        name = options.prompt_name or self.info.default_prompt_name
        return self.info.prompts.get(name, "") if name is not None else ""


@dataclass(slots=True)
class _Tokenising:
    """The tokenised inputs of one message so far, and their problems."""

    processor: PoolingProcessor
    task: PoolingTask
    options: PoolingOptions
    prompt: str
    inputs: list[list[int]] = field(default_factory=list)
    second_from: list[int] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, index: int, item: Input) -> None:
        path = f"documents[{index}]" if self.task == "score" else f"input[{index}]"
        second_from = 0
        if isinstance(item, str):
            token_ids = self._text(index, path, self.prompt + item)
        elif isinstance(item, tuple):
            token_ids, second_from = self._pair(index, path, *item)
        else:
            token_ids = self._ids(index, path, item)
        self.num_tokens += len(token_ids)
        self.inputs.append(token_ids)
        self.second_from.append(second_from)

    @property
    def _limit(self) -> int:
        return self.options.max_tokens or self.processor.info.max_input_tokens

    @property
    def _backend(self) -> Any:
        return self.processor._backend

    def _text(self, index: int, path: str, text: str) -> list[int]:
        adds = self.options.add_special_tokens
        found = self._backend.encode(text, add_special_tokens=False)
        room = self._limit - (self._backend.num_special_tokens_to_add(is_pair=False) if adds else 0)
        if not found.ids:
            self.wrong.append(f"{path} has no tokens")
            return []
        self._fit(index, path, found, room, len(found.ids) + self._limit - room)
        return list(self._backend.post_process(found, add_special_tokens=True).ids if adds else found.ids)

    def _pair(self, index: int, path: str, first: str, second: str) -> tuple[list[int], int]:
        one = self._backend.encode(first, add_special_tokens=False)
        two = self._backend.encode(second, add_special_tokens=False)
        used = len(one.ids) + self._backend.num_special_tokens_to_add(is_pair=True)
        if used >= self._limit:
            self.too_long.append(
                f"the first text of {path} has {len(one.ids)} tokens, which leaves no room for the second: the model"
                f" takes {self._limit} for both"
            )
            return [], 0
        self._fit(index, path, two, self._limit - used, used + len(two.ids))
        whole = self._backend.post_process(one, two, add_special_tokens=True)
        return list(whole.ids), whole.type_ids.index(1) if 1 in whole.type_ids else 0

    def _fit(self, index: int, path: str, found: Any, room: int, num_tokens: int) -> None:
        """Cut the end or the start of an encoding, or record that it is too long."""
        if len(found.ids) <= room:
            return
        if self.options.truncate == "error" or room < 1:
            self._too_long(path, num_tokens)
            return
        found.truncate(room, direction="left" if self.options.truncate == "start" else "right")
        self.truncated.append(index)

    def _ids(self, index: int, path: str, ids: list[int]) -> list[int]:
        size = self.processor._vocab_size
        if max(ids) >= size:
            place = next(place for place, token_id in enumerate(ids) if token_id >= size)
            self.wrong.append(f"{path}[{place}] must be below {size}, the size of the vocabulary, got {ids[place]}")
        if len(ids) <= self._limit:
            return ids
        if self.options.truncate == "error":
            self._too_long(path, len(ids))
            return ids
        self.truncated.append(index)
        return ids[-self._limit :] if self.options.truncate == "start" else ids[: self._limit]

    def _too_long(self, path: str, num_tokens: int) -> None:
        self.too_long.append(
            f'{path} has {num_tokens} tokens, the model takes {self._limit}: send less text, or truncate: "end"'
        )

    def raise_problems(self) -> None:
        """Raise the error for all problems, if there are any."""
        if self.num_tokens > MAX_INPUT_TOKENS and not self.too_long:
            self.wrong.append(f"the inputs have {self.num_tokens} tokens, at most {MAX_INPUT_TOKENS} are taken")
        problems = self.wrong + self.too_long
        shown = problems[:_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"{len(problems) - len(shown)} more inputs have problems")
        if problems:
            raise InvalidRequestError(shown) if self.wrong else ContextLengthError(shown)
