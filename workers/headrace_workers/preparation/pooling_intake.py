"""Checks the messages of pooling tasks, as `intake.py` does those of generations."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headrace_broker.pooling_messages import TASK_OF, PoolingRequest
from headrace_engine.requests.pooling_params import PoolingParams
from headrace_engine.text.pooling_input import PoolingTokenizer
from headrace_wire.codes import ErrorCode
from headrace_wire.errors import InvalidRequestError
from headrace_wire.pooling import MAX_INPUT_TOKENS, MAX_ROW_BYTES, PoolingTask, wrong_task
from headrace_workers.preparation.callback_rules import CallbackRules
from headrace_workers.preparation.intake import RefusedError, check_model, kwargs_of

_OPTIONS: Final = ("prompt", "prompt_name", "dimensions", "truncate", "max_tokens", "add_special_tokens")
_FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedInputs:
    """A pooling request that is checked and tokenised; plain data. The last attributes are those of `Prepared`."""

    task: PoolingTask
    inputs: list[list[int]]
    second_from: list[int]
    num_prompt_tokens: int
    """Tokens of the prompt that the pooling leaves out."""
    truncated: list[int]
    dimensions: int | None
    normalize: bool | None
    activation: bool
    given_numbers: dict[str, float] = field(default_factory=dict)
    is_chat: bool = False
    lora: None = None
    prompt_tail: None = None

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.inputs))


class PoolingIntake:
    """Checks whether a pooling model can serve a message's body. It has no side effects."""

    def __init__(
        self, tokenizer: PoolingTokenizer, served_names: Sequence[str], callback_rules: CallbackRules | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._served_names = served_names
        self._callback_rules = callback_rules or CallbackRules()

    def process(self, request_id: str, body: Any, task_name: str) -> PreparedInputs:  # noqa: ARG002  # as `Intake` has it
        """Check a decoded body and tokenise its inputs.

        Raises:
            RefusedError: with the error code and message for the client.
        """
        kwargs = kwargs_of(body, task_name, self._callback_rules)
        asked, serves = task_name.removeprefix("headrace."), self._tokenizer.info.tasks
        if asked not in serves:
            raise RefusedError(ErrorCode.UNSUPPORTED, wrong_task(self._served_names[0], serves, asked))
        try:
            request = PoolingRequest.parse(TASK_OF[task_name], kwargs)
            check_model(request.model, self._served_names)
            return self._tokenise(request)
        except InvalidRequestError as error:
            raise RefusedError(error.code, str(error)) from error

    def _tokenise(self, request: PoolingRequest) -> PreparedInputs:
        given = request.given
        options = {name: given[name] for name in _OPTIONS if name in given}
        if request.task == "score":
            options.setdefault("truncate", "end")
        found = self._tokenizer.tokenize(
            request.task, request.inputs, PoolingParams(**options), max_total=MAX_INPUT_TOKENS
        )
        self._check_size(request.task, len(found.inputs), given.get("dimensions"))
        return PreparedInputs(
            task=request.task,
            inputs=found.inputs,
            second_from=found.second_from,
            num_prompt_tokens=found.num_prompt_tokens,
            truncated=found.truncated,
            dimensions=given.get("dimensions"),
            normalize=given.get("normalize"),
            activation=given.get("activation", True),
        )

    def _check_size(self, task: PoolingTask, count: int, dimensions: int | None) -> None:
        """Raise InvalidRequestError if the rows are too large for an answer."""
        width = 1 if task == "score" else dimensions or self._tokenizer.info.dimensions
        size = count * width * _FLOAT_BYTES
        if size > MAX_ROW_BYTES:
            raise InvalidRequestError(
                f"{count} rows of {width} numbers are {size} bytes, at most {MAX_ROW_BYTES} are answered: send fewer"
                " inputs, or ask for fewer dimensions"
            )
