"""A checked call of a pooling API, and what the readers of all these APIs share."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from headrace_broker import RegisteredModel
from headrace_broker.decisions import Decided
from headrace_broker.pooling_results import Pooled
from headrace_gateway.requests.problems import Problems, root_of
from headrace_wire.pooling import PoolingTask, pooling_problems
from headrace_wire.rules import Boolean, Integer, OneOf, Rule
from headrace_wire.sampling import MAX_TOKEN_ID

WholeTask: TypeAlias = PoolingTask | Literal["decide"]
"""The tasks whose answers are sent whole."""
LOWEST_PRIORITY: Final = 9
CUT_END: Final = 'truncate: "end"'
"""What a worker advises for an input that is too long. `PoolingBody.names` has how an API says it."""
VLLM_NAMES: Final = {"max_tokens": "truncate_prompt_tokens", CUT_END: "truncate_prompt_tokens: -1"}
"""The queue's names of fields -> vLLM's."""
TOKENS: Final = Integer(1, MAX_TOKEN_ID)
BOOLEAN: Final = Boolean()
IGNORED: Final = {"user": "the tenant comes from the API key"}
"""Fields of all these APIs that are accepted without effect."""
_TEXT_ONLY: Final = "only text is supported"
REFUSED: Final = {
    "image": _TEXT_ONLY,
    "images": _TEXT_ONLY,
    "multi_modal_data": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "request_id": "use the header Idempotency-Key",
    "chat_template": "the worker uses the model's own template",
    "task": "the path names the task",
    "stream": "the answer is sent whole",
}
"""Fields of all these APIs that are refused: field -> what to do instead."""


@dataclass(frozen=True, slots=True)
class PoolingBody:
    """A request whose fields are all checked. It can be pickled."""

    model: str
    task: WholeTask
    given: Mapping[str, Any]
    """The keyword arguments of the queue's task, without the model."""
    write: "Writer"
    """Makes the answer's body. A function of a module."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How the answer is written."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The queue's names of fields -> the API's, where they differ."""
    priority: int | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)
    """See `Problems.ignored`."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        return {name: self.given[name] for name in _INPUTS if name in self.given}

    @property
    def queue_options(self) -> Mapping[str, Any]:
        return {name: value for name, value in self.given.items() if name not in _INPUTS}

    def answer(self, found: Pooled | Decided, answer_id: str) -> Any:
        """Return the body of the answer."""
        return self.write(self, found, answer_id)


Writer: TypeAlias = Callable[[PoolingBody, Any, str], Any]
"""The second argument is a `Pooled`, or a `Decided` of a decision."""
_INPUTS: Final = ("input", "query", "queries", "documents")


@dataclass(frozen=True, slots=True)
class PoolingApi:
    """How one API reads its bodies; a PoolingBody has the writer of its answer."""

    prefix: str
    """Prefix of the ids of its answers, such as `rerank-`."""
    task: WholeTask
    read: Callable[..., PoolingBody]
    """Makes the PoolingBody from the body and the `model`. Raises ApiError that lists every problem."""
    is_tei: bool = False
    """Whether it is an API of TEI, whose bodies name no model."""
    takes_adapters: bool = False
    """Whether a body may name a LoRA adapter as its model. `read` then has the argument `lora`."""

    def read_for(self, body: Mapping[str, Any], *, model: RegisteredModel, lora: str | None) -> PoolingBody:
        """Read a body for a model, or for one of its adapters."""
        return self.read(body, model=model, **({"lora": lora} if self.takes_adapters else {}))


class BodyFields:
    """Reads the fields of one body and collects their problems.

    Args:
        rules: the served fields -> their rules.
        refused: further fields that are refused -> what to do instead.
        problems: the problems that were found before.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        rules: Mapping[str, Rule],
        refused: Mapping[str, str] | None = None,
        problems: Problems | None = None,
    ) -> None:
        self.given: Final = {name: value for name, value in body.items() if value is not None}
        self.problems: Final = Problems() if problems is None else problems
        known = {"model", *rules, *IGNORED}
        unsupported = {name: why for name, why in {**REFUSED, **(refused or {})}.items() if name not in known}
        self.problems.unknown_names(self.given, known, unsupported)
        self._wrong: Final[set[str]] = set()
        for name, rule in rules.items():
            if name in self.given and (problem := rule.problem(name, self.given[name])):
                self.problems.add(problem.partition(" ")[0], problem)
                self._wrong.add(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value; the default if it is absent or wrong."""
        return default if name in self._wrong else self.given.get(name, default)

    def queue_options(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the valid fields of `names` (the API's name -> the queue's) by the queue's names."""
        return {ours: self.get(name) for name, ours in names.items() if self.get(name) is not None}

    def body(
        self,
        model: RegisteredModel,
        task: PoolingTask,
        given: Mapping[str, Any],
        write: Writer,
        *,
        options: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
        priority: int | None = None,
    ) -> PoolingBody:
        """Check the queue's keyword arguments too, and return the call. Raises ApiError with every problem."""
        names = names or {}
        for sentence in pooling_problems(task, given):
            self._add(sentence, names)
        self.problems.raise_any()
        named = self.given.get("model", model.name)
        return PoolingBody(named, task, given, write, options or {}, names, priority, self.problems.ignored)

    def _add(self, sentence: str, names: Mapping[str, str]) -> None:
        path, _, rest = sentence.partition(" ")
        root = root_of(path)
        name = names.get(root, root)
        if name not in self._wrong:
            path = name + path.removeprefix(root)
            self.problems.add(path, f"{path} {rest}")


def truncation_rules() -> dict[str, Rule]:
    """Return the rules of vLLM's fields for long inputs."""
    return {"truncate_prompt_tokens": Integer(-1, MAX_TOKEN_ID), "truncation_side": OneOf(("left", "right"))}


def read_truncation(fields: BodyFields) -> dict[str, Any]:
    """Return the queue's options for vLLM's fields. -1 tokens are the model's limit."""
    tokens, side = fields.get("truncate_prompt_tokens"), fields.get("truncation_side")
    if tokens is None:
        if side is not None:
            fields.problems.add("truncation_side", "truncation_side requires truncate_prompt_tokens")
        return {}
    if tokens == 0:
        message = "truncate_prompt_tokens must be -1, the model's limit, or at least 1, got 0"
        fields.problems.add("truncate_prompt_tokens", message)
        return {}
    found = {"truncate": "start" if side == "left" else "end"}
    return found if tokens == -1 else {**found, "max_tokens": tokens}


def within_limit(tokens: int | None, model: RegisteredModel) -> dict[str, Any]:
    """Return the option `max_tokens` for a bound that has no effect above the model's limit."""
    if tokens is None or (model.max_input_tokens is not None and tokens >= model.max_input_tokens):
        return {}
    return {"max_tokens": tokens}


def activation_rules() -> dict[str, Rule]:
    """Return the rules of vLLM's names for the activation; the last two are of older releases."""
    return dict.fromkeys(_ACTIVATION, BOOLEAN)


def read_activation(fields: BodyFields) -> dict[str, Any]:
    """Return the queue's option `activation`."""
    found = fields.queue_options({name: name for name in _ACTIVATION})
    if len(set(found.values())) > 1:
        fields.problems.add(next(iter(found)), f"{' and '.join(found)} must have the same value")
    return {"activation": next(iter(found.values()))} if found else {}


_ACTIVATION: Final = ("use_activation", "activation", "softmax")


def usage_of(pooled: Pooled) -> dict[str, Any]:
    """Return the usage as OpenAI counts it."""
    tokens = pooled.usage.prompt_tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def vllm_answer(body: PoolingBody, pooled: Pooled, answer_id: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    """Return vLLM's answer around its `data`."""
    return {
        "id": answer_id,
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": data,
        "usage": {**usage_of(pooled), "completion_tokens": 0, "prompt_tokens_details": None},
    }


def cohere_meta(pooled: Pooled, billed: Mapping[str, int]) -> dict[str, Any]:
    """Return the `meta` of Cohere's answers."""
    tokens = {"input_tokens": pooled.usage.prompt_tokens}
    return {"api_version": {"version": "2"}, "billed_units": dict(billed), "tokens": tokens}
