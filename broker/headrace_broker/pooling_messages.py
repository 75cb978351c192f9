"""The request of a pooling task as it is sent through the queue. `pooling_results.py` has its result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias

from headrace_broker.errors import InvalidRequestError
from headrace_wire.pooling import POOLING_TASKS, PoolingTask, pooling_problems
from headrace_wire.values import plain, shown

Input: TypeAlias = str | list[int] | tuple[str, str]
"""A text, token ids, or a pair of texts."""
TASK_OF: Final[Mapping[str, PoolingTask]] = {f"headrace.{task}": task for task in POOLING_TASKS}
"""The pooling task of each Celery task name."""


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """The keyword arguments of one pooling task. `parse` makes a checked one. `repr` omits everything a user wrote."""

    task: PoolingTask
    given: dict[str, Any] = field(repr=False)

    @classmethod
    def parse(cls, task: PoolingTask, kwargs: Mapping[str, Any], *, is_call: bool = False) -> Self:
        """Check the keyword arguments of a pooling task and make a request; null counts as absent.

        With `is_call`, the inputs may be too many for one message. Raises InvalidRequestError, which names every
        problem at once.
        """
        if not isinstance(kwargs, Mapping):
            raise InvalidRequestError(f"the request must be a map, got {shown(kwargs)}")
        given = {key: _plain(value) for key, value in kwargs.items() if value is not None}
        if problems := pooling_problems(task, given, is_call=is_call):
            raise InvalidRequestError(problems)
        return cls(task, given)

    @property
    def task_name(self) -> str:
        """The name of the Celery task."""
        return f"headrace.{self.task}"

    @property
    def model(self) -> str | None:
        return self.given.get("model")

    @property
    def inputs(self) -> list[Input]:
        """The inputs, one for each row of the result."""
        if self.task != "score":
            return [item if isinstance(item, str) else _pair_or_ids(item) for item in _listed(self.given["input"])]
        documents = _listed(self.given["documents"])
        queries = _listed(self.given.get("queries", self.given.get("query")))
        if len(queries) == 1:
            queries = queries * len(documents)
        return list(zip(queries, documents, strict=True))

    def part(self, first: int, stop: int) -> "PoolingRequest":
        """Return a request for some of the inputs."""
        given = dict(self.given)
        for name in ("input", "documents", "queries"):
            if isinstance(listed := given.get(name), (list, tuple)) and (name != "queries" or len(listed) > 1):
                given[name] = listed[first:stop]
        return PoolingRequest(self.task, given)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the task's keyword arguments. `parse` converts them to an equal request."""
        return dict(self.given)


def _plain(value: Any) -> Any:
    value = plain(value)
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else value


def _pair_or_ids(item: Any) -> list[int] | tuple[str, str]:
    return (item[0], item[1]) if isinstance(item[0], str) else item
