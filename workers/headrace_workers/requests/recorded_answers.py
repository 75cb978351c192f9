"""Answers to requests that have no job here: from the stream of an earlier attempt, or an error alone."""

from collections.abc import Sequence
from typing import Any

from headrace_broker.decisions import DECIDE_TASK, DecisionResult, decision_of
from headrace_broker.pooling_messages import TASK_OF
from headrace_broker.pooling_results import PoolingResult, recorded_pooling_result
from headrace_broker.results import ErrorInfo, GenerateResult, Usage
from headrace_broker.streams.events import ChunkEvent, EndEvent, RowsEvent, StartEvent, StreamEvent
from headrace_workers.requests.generate_job import recorded_result


def recorded_answer(task_name: str, request_id: str, entries: Sequence[StreamEvent], ended: EndEvent) -> dict[str, Any]:
    """Read the result of an ended request from its stream."""
    if task_name == DECIDE_TASK:
        return decision_of(request_id, ended).to_wire()
    task = TASK_OF.get(task_name)
    if task is None:
        return recorded_result(request_id, entries, ended).to_wire()
    return recorded_pooling_result(request_id, task, entries, ended).to_wire()


def failed_answer(task_name: str | None, request_id: str, error: ErrorInfo) -> dict[str, Any]:
    """Return the result of a request that never ran. The task name is None if the message could not be read."""
    if task_name == DECIDE_TASK:
        return DecisionResult(request_id, error=error).to_wire()
    if task_name in TASK_OF:
        return PoolingResult(request_id, error=error).to_wire()
    return GenerateResult(request_id, [], None, error).to_wire()


def recorded_usage(entries: Sequence[StreamEvent]) -> Usage:
    """Return the usage that the entries of a stream show; zeros if they have no output."""
    num_tokens = sum(len(entry.token_ids) for entry in entries if isinstance(entry, ChunkEvent))
    if not num_tokens and not any(isinstance(entry, RowsEvent) for entry in entries):
        return Usage(0, 0, 0)
    prompt_tokens = max((entry.prompt_tokens or 0 for entry in entries if isinstance(entry, StartEvent)), default=0)
    return Usage(prompt_tokens, 0, num_tokens)
