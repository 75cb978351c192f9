"""Every line of a batch checked before anything is sent, and what was answered before found again."""

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple

from headrace_gateway import ApiError
from headrace_gateway.batch_line import read_line
from headrace_gateway.keys import ANYONE
from headrace_gateway.model_catalog import ModelCatalog
from headrace_workers.batch.answer_file import AnswerFile
from headrace_workers.batch.input_file import InputFile
from headrace_workers.errors import BatchError, InputRefusedError, LineProblem

_SHOWN: Final = 20
_PAUSE_EACH: Final = 100
"""Lines after which the event loop turns, so that Ctrl-C is heard."""


class KnownLine(NamedTuple):
    """What is kept of every line of the input."""

    number: int
    id: str
    """Of the line that answers it."""


async def check_input(source: InputFile, models: ModelCatalog) -> dict[str, KnownLine]:
    """Every line by its custom id.

    Raises InputRefusedError with what is wrong, QueueUnavailableError where the models cannot be asked for.
    """
    known: dict[str, KnownLine] = {}
    problems: list[LineProblem] = []
    num_problems = 0
    for position, (number, raw) in enumerate(source.lines()):
        if position % _PAUSE_EACH == 0:
            await asyncio.sleep(0)
        try:
            line = read_line(raw)
            first = known.setdefault(line.custom_id, KnownLine(number, line.id))
            problem = None if first.number == number else _duplicate(number, line.custom_id, first)
            if problem is None:
                model, lora = await models.find(line.body.get("model"), ANYONE)
                line.read_call(model, lora)
        except ApiError as error:
            problem = _problem(number, error)
        if problem is not None:
            num_problems += 1
            problems += [problem] if len(problems) < _SHOWN else []
    if not known and not num_problems:
        problems, num_problems = [LineProblem(None, "empty_file", "it has no lines")], 1
    if problems:
        raise InputRefusedError(source.name, problems, num_problems)
    return known


def _duplicate(number: int, custom_id: str, first: KnownLine) -> LineProblem:
    message = f"custom_id {custom_id[:64]!r} is that of line {first.number}"
    return LineProblem(number, "duplicate_custom_id", message, "custom_id")


def _problem(number: int, error: ApiError) -> LineProblem:
    message = error.message
    if error.code == "model_not_found":
        message = "no worker has ever served the model that body.model names"
    return LineProblem(number, error.code, message, error.param)


def find_answered(file: AnswerFile, known: Mapping[str, KnownLine], *, is_ours: bool) -> set[str]:
    """Custom ids that the file has an answer of.

    Raises BatchError for an answer of another request than the input's, and for a second one of the same.
    """
    answered: set[str] = set()
    for number, line in enumerate(file.answered(is_ours=is_ours), 1):
        where = f"line {number} of {file.name} answers"
        if line.custom_id not in known or known[line.custom_id].id != line.id:
            message = f"{where} another request of the custom_id {line.custom_id[:64]!r} than the input has"
            raise BatchError(f"{message}: name another file, or delete that line to send the request")
        if line.custom_id in answered:
            raise BatchError(f"{where} the custom_id {line.custom_id[:64]!r} a second time: delete one of the two")
        answered.add(line.custom_id)
    return answered
