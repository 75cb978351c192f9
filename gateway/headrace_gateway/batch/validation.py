"""Checks every line of a batch before any is sent, and finds the lines that were answered before."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from headrace_gateway.batch.answer_file import AnswerFile
from headrace_gateway.batch.input_file import InputFile
from headrace_gateway.batch_line import read_line
from headrace_gateway.errors import ApiError, BatchError, InputRefusedError, LineProblem
from headrace_gateway.keys import ANYONE, ApiKey
from headrace_gateway.model_catalog import ModelCatalog

_SHOWN: Final = 20


class KnownLine(NamedTuple):
    """What is remembered of each line of the input."""

    number: int
    id: str
    """The id of the line that answers it."""


class CheckedInput(NamedTuple):
    """What is known of an input without errors."""

    lines: dict[str, KnownLine]
    """The lines by custom id."""
    models: set[str]
    """The models that the lines name."""


async def check_input(
    source: InputFile,
    models: ModelCatalog,
    key: ApiKey = ANYONE,
    *,
    endpoint: str | None = None,
    max_lines: int | None = None,
) -> CheckedInput:
    """Check every line.

    Args:
        endpoint: the `url` that all lines must have; None: any.
        max_lines: None: no limit.

    Raises InputRefusedError with the problems, QueueUnavailableError if the models cannot be read from Redis.
    """
    known: dict[str, KnownLine] = {}
    named: set[str] = set()
    problems: list[LineProblem] = []
    num_problems = num_lines = 0
    async for number, raw in source.read():
        num_lines += 1
        if max_lines is not None and num_lines > max_lines:
            message = f"it has more than {max_lines} lines: split it into several batches"
            raise InputRefusedError(source.name, [LineProblem(None, "too_many_tasks", message)], 1)
        problem = await _check_line(number, raw, known, named, models, key, endpoint)
        if problem is not None:
            num_problems += 1
            problems += [problem] if len(problems) < _SHOWN else []
    if not known and not num_problems:
        problems, num_problems = [LineProblem(None, "empty_file", "it has no lines")], 1
    if problems:
        raise InputRefusedError(source.name, problems, num_problems)
    return CheckedInput(known, named)


async def _check_line(
    number: int,
    raw: bytes,
    known: dict[str, KnownLine],
    named: set[str],
    models: ModelCatalog,
    key: ApiKey,
    endpoint: str | None,
) -> LineProblem | None:
    try:
        line = read_line(raw)
        if endpoint is not None and line.url != endpoint:
            return _other_url(number, endpoint)
        first = known.setdefault(line.custom_id, KnownLine(number, line.id))
        if first.number != number:
            return _duplicate(number, line.custom_id, first)
        model, lora = await models.find(line.body.get("model"), key)
        line.read_call(model, lora)
        named.add(line.body["model"])
    except ApiError as error:
        if endpoint is not None and error.code == "invalid_url":
            return _other_url(number, endpoint)
        return _problem(number, error)
    return None


def _other_url(number: int, endpoint: str) -> LineProblem:
    return LineProblem(number, "url_mismatch", f"url must be the endpoint of the batch, {endpoint}", "url")


def _duplicate(number: int, custom_id: str, first: KnownLine) -> LineProblem:
    message = f"custom_id {custom_id[:64]!r} is already used in line {first.number}"
    return LineProblem(number, "duplicate_custom_id", message, "custom_id")


def _problem(number: int, error: ApiError) -> LineProblem:
    message = error.message
    if error.code == "model_not_found":
        message = "the model in body.model does not exist: no worker has registered it"
    return LineProblem(number, error.code, message, error.param)


def find_answered(file: AnswerFile, known: Mapping[str, KnownLine], *, is_ours: bool) -> set[str]:
    """Return the custom ids that the file has an answer for.

    Raises BatchError for an answer to a request that is not in the input, and for a second answer to the same one.
    """
    answered: set[str] = set()
    for number, line in enumerate(file.answered(is_ours=is_ours), 1):
        where = f"line {number} of {file.name} answers"
        if line.custom_id not in known or known[line.custom_id].id != line.id:
            message = f"{where} a request with the custom_id {line.custom_id[:64]!r} that differs from the input's"
            raise BatchError(f"{message}: name another file, or delete that line to send the request")
        if line.custom_id in answered:
            raise BatchError(f"{where} the custom_id {line.custom_id[:64]!r} a second time: delete one of the two")
        answered.add(line.custom_id)
    return answered
