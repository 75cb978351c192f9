"""Checks every line of a batch before any is sent, and finds the lines that were answered before."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from headrace_gateway.batch.answer_file import AnswerFile
from headrace_gateway.batch.input_file import InputFile
from headrace_gateway.batch.line import LineReader
from headrace_gateway.errors import ApiError, BatchError, InputRefusedError, LineProblem, ModelLoadingError
from headrace_gateway.keys.api_key import ANYONE, ApiKey
from headrace_gateway.keys.model_catalog import ModelCatalog
from headrace_gateway.requests.body_process import BodyProcess
from headrace_gateway.requests.problems import refusal_of
from headrace_wire.codes import BatchCode, ErrorCode

_SHOWN: Final = 20


class KnownLine(NamedTuple):
    """The data that stays in memory for each line of the input."""

    number: int
    id: str
    """Id of the answer line."""


class CheckedInput(NamedTuple):
    """The lines and models of an input without errors."""

    lines: dict[str, KnownLine]
    """The lines by custom id."""
    models: set[str]
    """The models that the lines name."""


async def check_input(
    source: InputFile,
    models: ModelCatalog,
    key: ApiKey = ANYONE,
    *,
    bodies: BodyProcess | None = None,
    endpoint: str | None = None,
    max_lines: int | None = None,
    max_inputs: int | None = None,
    strict: bool = False,
) -> CheckedInput:
    """Check every line.

    Args:
        bodies: reads the large lines; None: this process reads them.
        endpoint: the `url` that all lines must have; None: any.
        max_lines: number of lines that the input may have; None: no limit.
        max_inputs: number of inputs that its pooling calls may have together; None: no limit.
        strict: refuse fields that would be ignored.

    Raises InputRefusedError with the problems, QueueUnavailableError if the models cannot be read from Redis.
    """
    known: dict[str, KnownLine] = {}
    named: set[str] = set()
    problems: list[LineProblem] = []
    num_problems = num_inputs = 0
    reader = LineReader(bodies, key)
    async for number, raw in source.read(max_lines=max_lines):
        checked = await _check_line(number, raw, reader, known, named, models, key, endpoint, strict)
        if isinstance(checked, LineProblem):
            num_problems += 1
            problems += [checked] if len(problems) < _SHOWN else []
        else:
            num_inputs += checked
    if max_inputs is not None and num_inputs > max_inputs:
        message = f"its lines have {num_inputs} inputs, more than {max_inputs}: split it into several batches"
        problems, num_problems = [LineProblem(None, BatchCode.TOO_MANY_TASKS, message), *problems], num_problems + 1
    if not known and not num_problems:
        problems, num_problems = [LineProblem(None, BatchCode.EMPTY_FILE, "it has no lines")], 1
    if problems:
        raise InputRefusedError(source.name, problems, num_problems)
    return CheckedInput(known, named)


async def _check_line(
    number: int,
    raw: bytes,
    reader: LineReader,
    known: dict[str, KnownLine],
    named: set[str],
    models: ModelCatalog,
    key: ApiKey,
    endpoint: str | None,
    strict: bool,
) -> LineProblem | int:
    """Return the number of inputs of the line, or its problem."""
    try:
        line = await reader.line(raw)
        if endpoint is not None and line.url != endpoint:
            return _other_url(number, endpoint)
        first = known.setdefault(line.custom_id, KnownLine(number, line.id))
        if first.number != number:
            return _duplicate(number, line.custom_id, first)
        model, lora = await models.find(line.model, key, line.task)
        ignored = (await reader.call(line, model, lora)).ignored
        if strict and ignored:
            raise refusal_of(ignored)
        assert line.model is not None
        named.add(line.model)
    except ApiError as error:
        if endpoint is not None and error.code == BatchCode.INVALID_URL:
            return _other_url(number, endpoint)
        return _problem(number, error)
    return line.num_inputs


def _other_url(number: int, endpoint: str) -> LineProblem:
    return LineProblem(number, BatchCode.URL_MISMATCH, f"url must be the endpoint of the batch, {endpoint}", "url")


def _duplicate(number: int, custom_id: str, first: KnownLine) -> LineProblem:
    message = f"custom_id {custom_id[:64]!r} is already used in line {first.number}"
    return LineProblem(number, BatchCode.DUPLICATE_CUSTOM_ID, message, "custom_id")


def _problem(number: int, error: ApiError) -> LineProblem:
    message = error.message
    if error.code == ErrorCode.MODEL_NOT_FOUND and not isinstance(error, ModelLoadingError):
        message = "the model in body.model does not exist: no worker has registered it"
    return LineProblem(number, error.code, message, error.param)


def find_answered(file: AnswerFile, known: Mapping[str, KnownLine], *, is_ours: bool) -> set[str]:
    """Return the custom ids that the file has an answer for.

    Raises BatchError for an answer to a request that is not in the input, and for a second answer to one request.
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
