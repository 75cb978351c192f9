"""Turns a positional argument into keyword arguments. A chain passes the result of the task before it as the first."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace_broker.decisions import DECIDE_TASK
from headrace_broker.messages import TASK_NAME
from headrace_wire.errors import InvalidRequestError
from headrace_wire.values import shown

_INPUT_TASKS: Final = (DECIDE_TASK, "headrace.embed", "headrace.classify")


def keyword_arguments(task_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a message.

    The only positional argument may be a map of keyword arguments. For `headrace.generate` it may also be a text, which
    is the prompt, or a list of maps, which are the messages of a chat. For the tasks with an `input` it may be a text
    or a list, which is the input.

    Raises InvalidRequestError for other arguments, and for a key that is given twice.
    """
    if not args:
        return dict(kwargs)
    if len(args) > 1:
        raise InvalidRequestError(f"at most one positional argument is allowed, got {len(args)}; use keyword arguments")
    given = _given_by(task_name, args[0])
    if twice := sorted(given.keys() & kwargs.keys(), key=str):
        raise InvalidRequestError(f"{shown(twice[0])} is given twice: by the positional argument and as a keyword")
    return {**given, **kwargs}


def _given_by(task_name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if task_name in _INPUT_TASKS and isinstance(value, str | list):
        return {"input": value}
    if task_name == TASK_NAME and isinstance(value, str):
        return {"prompt": value}
    if task_name == TASK_NAME and isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return {"messages": value}
    understood = {
        TASK_NAME: "a text (the prompt), a list of messages, or a map of keyword arguments",
        **dict.fromkeys(_INPUT_TASKS, "an input, or a map of keyword arguments"),
    }.get(task_name, "a map of keyword arguments")
    raise InvalidRequestError(f"the positional argument must be {understood}, got {shown(value)}")
