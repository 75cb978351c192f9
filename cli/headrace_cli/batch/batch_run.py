"""`BatchRun`: sends the unanswered lines of a batch, one window at a time, and writes their answers."""

import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace_broker import AsyncClient, BrokerSettings
from headrace_broker.client.unavailable import unavailable
from headrace_gateway import ApiError
from headrace_gateway.batch.answer_file import AnswerFile
from headrace_gateway.batch.input_file import InputFile
from headrace_gateway.batch.line import BatchLine, read_line
from headrace_gateway.batch.line_request import LineAnswer, LineRequests, patient_hub
from headrace_gateway.batch.validation import KnownLine, check_input, find_answered
from headrace_gateway.batch.window import SharedWindow, answer_lines
from headrace_gateway.errors import BatchError
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.keys.model_catalog import ModelCatalog

_SECRET: Final = re.compile(r"[0-9a-f]{32}\n")


class RunFile:
    """Holds the secret from which the request ids of a run are derived.

    The next run after a kill derives the same ids and so finds its requests in the queue. Other clients cannot guess
    the ids. The file is beside the output, and is deleted when all lines have answers. The constructor reads the file
    if it exists, and `begin` creates it. Both raise BatchError.

    Args:
        path: None for a run that cannot be resumed.
    """

    def __init__(self, path: Path | None) -> None:
        self._path: Final = path
        self.is_new = True
        """Whether there is no unfinished run to resume."""
        self.secret = secrets.token_hex(16)
        if path is None:
            return
        try:
            text = path.read_text(encoding="ascii", errors="replace") if path.exists() else ""
        except OSError as error:
            raise BatchError(f"{path} cannot be read: {error.strerror}") from None
        if not text:  # then nothing was sent, because the secret is written before anything is sent
            return
        if not _SECRET.fullmatch(text):
            raise BatchError(f"{path} is not a run file: delete it, or name another output")
        self.secret, self.is_new = text.strip(), False

    def begin(self) -> None:
        """Write the secret, for the next run; call it before anything is sent."""
        if self._path is None or not self.is_new:
            return
        try:
            self._path.touch(mode=0o600)
            with self._path.open("w", encoding="ascii") as file:
                file.write(f"{self.secret}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BatchError(f"{self._path} cannot be written: {error.strerror}") from None

    def delete(self) -> None:
        """Delete the file; call it when the run is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The settings of a run. `source`, `output` and `errors` are paths; `-` is standard input or output."""

    source: str
    output: str
    errors: str
    redis_url: str
    window: int = 256
    priority: int = 9


@dataclass(slots=True)
class BatchCounts:
    """Counts of the input's lines, including the lines that earlier runs answered."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRun:
    """One run of a batch.

    Args:
        on_progress: called after each change of the counts.
        on_waiting: called with the reason each time that a line cannot be sent.
    """

    def __init__(
        self,
        settings: BatchSettings,
        *,
        on_progress: Callable[[BatchCounts], None] = lambda _: None,
        on_waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._settings: Final = settings
        self._on_progress: Final = on_progress
        self._on_waiting: Final = on_waiting
        self.counts: Final = BatchCounts()
        self._output: Final = AnswerFile(settings.output)
        self.output_name: Final = self._output.name
        self._errors: Final = AnswerFile(settings.errors)

    async def run(self) -> None:
        """Send every line that has no answer, and write the answers as they arrive.

        Raises InputRefusedError before it sends anything; BatchError and QueueUnavailableError if it cannot continue.
        """
        broker = BrokerSettings.from_env({**os.environ, "HEADRACE_REDIS_URL": self._settings.redis_url})
        with InputFile(self._settings.source) as source:
            async with AsyncClient(broker) as client:
                models = ModelCatalog(client)
                known = (await check_input(source, models)).lines
                try:
                    await self._answer_all(source, known, client, models)
                finally:
                    self._output.close()
                    self._errors.close()

    async def _answer_all(
        self, source: InputFile, known: Mapping[str, KnownLine], client: AsyncClient, models: ModelCatalog
    ) -> None:
        self._output.open()
        run = RunFile(Path(f"{self._settings.output}.run") if self._output.is_regular else None)
        answered = self._find_answered(known, is_ours=not run.is_new)
        run.begin()
        self._on_progress(self.counts)
        async with patient_hub(client.settings) as hub:
            requests = LineRequests(
                client,
                hub,
                models,
                secret=run.secret,
                key=ApiKey(name="batch", best_priority=self._settings.priority),
                on_waiting=self._on_waiting,
            )
            try:
                with unavailable(client.settings, "read the answers"):
                    await self._answer_window(source, known, answered, requests)
            finally:
                self._output.sync()
                self._errors.sync()
        run.delete()

    def _find_answered(self, known: Mapping[str, KnownLine], *, is_ours: bool) -> set[str]:
        if self._errors.exists():
            if self._output.exists() and self._errors.is_same_as(self._output):
                raise BatchError(f"{self._errors.name} is also the output: errors need another file")
            self._errors.open()
        completed = find_answered(self._output, known, is_ours=is_ours)
        failed = find_answered(self._errors, known, is_ours=is_ours)
        if twice := completed & failed:
            where = f"in {self._output.name} and in {self._errors.name}"
            raise BatchError(f"the custom_id {min(twice)[:64]!r} has an answer {where}: delete one of them")
        self.counts.total = len(known)
        self.counts.completed, self.counts.failed = len(completed), len(failed)
        return completed | failed

    async def _answer_window(
        self, source: InputFile, known: Mapping[str, KnownLine], answered: set[str], requests: LineRequests
    ) -> None:
        async def lines() -> AsyncIterator[tuple[int, BatchLine]]:
            async for number, raw in source.read():
                line = _read_again(source, number, raw, known)
                if line.custom_id not in answered:
                    yield number, line

        async def deliver(_: int, answer: LineAnswer) -> None:
            if answer.is_success:
                self._output.append(answer.line)
                self.counts.completed += 1
            else:
                self._errors.append(answer.line)
                self.counts.failed += 1
            self._on_progress(self.counts)

        await answer_lines(lines(), requests, SharedWindow(self._settings.window).share(), deliver)
        if not 0 < self.counts.total == self.counts.completed + self.counts.failed:
            raise BatchError(f"{source.name} lost lines while the batch ran: run the command again")


def _read_again(source: InputFile, number: int, raw: bytes, known: Mapping[str, KnownLine]) -> BatchLine:
    try:
        line = read_line(raw)
    except ApiError:
        line = None
    if line is None or known.get(line.custom_id) != KnownLine(number, line.id):
        raise BatchError(f"line {number} of {source.name} was changed while the batch ran: run the command again")
    return line
