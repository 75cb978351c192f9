"""`BatchWork`: runs one batch, from its validation to its files.

Another replica can repeat any step: the committed state is in Redis and on the disk.
"""

import asyncio
import contextlib
import hashlib
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from headrace_broker import AsyncClient, HeadraceBrokerError, QueueUnavailableError
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_broker.streams.hub import StreamHub
from headrace_gateway.background_task import check_cancelled
from headrace_gateway.batch.due_times import LEAST_WINDOW, DueTimes
from headrace_gateway.batch.input_file import InputFile
from headrace_gateway.batch.line import BatchLine, LineReader
from headrace_gateway.batch.line_request import LineAnswer, LineRequests
from headrace_gateway.batch.record import SOONEST, Batch, BatchRecord
from headrace_gateway.batch.segments import SegmentWriter, answered_ids, committed_parts
from headrace_gateway.batch.store import BatchStore, ClaimLostError
from headrace_gateway.batch.validation import CheckedInput, check_input
from headrace_gateway.batch.window import SharedWindow, answer_lines
from headrace_gateway.errors import BatchError, InputRefusedError
from headrace_gateway.files.stored_files import (
    FileLostError,
    StoredFiles,
    copy_to_disk,
    is_missing,
    owner_of,
    sync_folder,
)
from headrace_gateway.files.threads import file_owner, in_file_thread
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.keys.model_catalog import ModelCatalog
from headrace_gateway.redis.claims import Claim
from headrace_gateway.requests.body_process import BodyProcess
from headrace_monitoring.gateway_metrics import GatewayMetrics
from headrace_wire.codes import BatchCode

MAX_LINES: Final = 50_000
MAX_INPUTS: Final = 50_000
"""Inputs of all pooling calls of a batch. OpenAI has the same limits."""
_LOOK_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 10.0
"""Seconds that a stopped batch waits for the answers of requests that it has cancelled."""
_DISK_SECONDS: Final = 600.0
"""Seconds that a stopped batch waits for the disk."""
_END_SECONDS: Final = 5.0
"""Seconds that an ended batch keeps its folder. Redis flushes the status to its append-only file within a second."""
_REST_LINES: Final = 1000
_REASONS: Final = {
    BatchCode.BATCH_CANCELLED: "the batch was cancelled before this request was answered",
    BatchCode.BATCH_EXPIRED: "the batch expired before this request was answered",
}

Value = TypeVar("Value")

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BatchContext:
    """The objects that all batches of a replica share."""

    client: AsyncClient
    hub: StreamHub
    """Retries for as long as Redis is unavailable."""
    models: ModelCatalog
    store: BatchStore
    files: StoredFiles
    bodies: BodyProcess
    """Reads the large lines."""
    window: SharedWindow
    metrics: GatewayMetrics
    priority: int
    """The highest priority that a line may have. 0 is the highest of all."""
    publish: Callable[..., Awaitable[None]]
    """Publishes the end of a batch to webhooks."""
    strict: bool = False
    """Refuse input with fields that would be ignored."""
    pause: float = 2.0
    """Seconds before a failed step is retried."""


class BatchWork:
    """`run` takes the batch to its end. Raises ClaimLostError if another replica has taken it over."""

    def __init__(self, context: BatchContext, claim: Claim) -> None:
        self._context: Final = context
        self._claim: Final = claim
        self._key = ApiKey("")
        self._folder = Path()
        self._began_at: Final = time.time()
        self._patient_until = math.inf
        self.waits_for_disk = False
        self.moved_at = time.monotonic()
        """When a line was last answered, or the status last changed."""

    async def run(self) -> None:
        steps: dict[str, Callable[[Batch], Awaitable[None]]] = {
            "validating": self._validate,
            "in_progress": self._answer,
            "cancelling": self._answer,
            "finalizing": lambda batch: self._make_files(("finalizing",), batch.ends_as),
        }
        before: Batch | None = None
        while True:
            batch = await self._find()
            if batch is None:
                logger.warning("batch lost by Redis", id=self._claim.item)
                await self._with_redis(partial(self._context.store.claims.finish, self._claim))
                return
            self._key = batch.record.api_key
            file_owner.set(owner_of(self._key.name, self._key.tenant))
            self._folder = self._context.files.batch_folder(self._key, batch.record.id)
            if batch.has_ended:
                await self._publish(batch)
                if before is not None:  # keep the folder until Redis has flushed this status
                    release = partial(self._context.store.claims.release, self._claim, after=_END_SECONDS)
                    await self._with_redis(release)
                    return
                break
            if batch == before:
                await asyncio.sleep(self._context.pause)
            before = batch
            try:
                await steps[batch.status](batch)
            except FileLostError as error:
                await self._fail(batch, error)
            self.moved_at = time.monotonic()
        await self._with_redis(partial(self._context.store.claims.finish, self._claim))
        await in_file_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _publish(self, batch: Batch) -> None:
        logger.info("batch ended", id=batch.record.id, status=batch.status)
        record = batch.record
        at = batch.times.get(batch.status, record.created_at)
        publish = partial(self._context.publish, f"batch.{batch.status}", record.id)
        await self._with_redis(partial(publish, key=record.key, tenant=record.tenant, at=at))

    async def _fail(self, batch: Batch, error: FileLostError) -> None:
        """Fail the batch: another program has deleted its files.

        Raises ClaimLostError if another replica has taken the batch over, because that replica may have deleted them.
        """
        if await self._with_redis(partial(self._context.store.claims.renew, [self._claim])):
            raise ClaimLostError(self._claim.item)
        message = f"files of this batch are missing from the gateway's directory: {error}"
        problem = {"code": BatchCode.FILES_LOST, "line": None, "message": message, "param": None}
        await self._move((batch.status,), "failed", errors=[problem])

    async def _validate(self, batch: Batch) -> None:
        try:
            checked = await self._checked(batch.record)
        except InputRefusedError as error:
            errors = [asdict(problem) for problem in error.problems]
            await self._move(("validating", "cancelling"), "failed", errors=errors)
            return
        if checked is None:
            return
        model = next(iter(checked.models)) if len(checked.models) == 1 else None
        await self._move(("validating",), "in_progress", total=len(checked.lines), model=model)

    async def _checked(self, record: BatchRecord) -> CheckedInput | None:
        """Check the input. Return None if the batch is stopped before the check ends."""
        checking = asyncio.create_task(self._with_disk(partial(self._check, record)))
        looking = asyncio.create_task(self._until_stopped(record, "validating"))
        try:
            await _first(checking, looking)
            if checking.done():
                return checking.result()
            if looking.result() == BatchCode.BATCH_EXPIRED:
                await self._move(("validating",), "finalizing", ends_as="expired")
            return None
        finally:
            await _cancelled(checking)
            await _cancelled(looking)

    async def _check(self, record: BatchRecord) -> CheckedInput:
        while True:
            try:
                with await self._input() as source:
                    return await check_input(
                        source,
                        self._context.models,
                        self._key,
                        bodies=self._context.bodies,
                        endpoint=record.endpoint,
                        max_lines=MAX_LINES,
                        max_inputs=MAX_INPUTS,
                        strict=self._context.strict,
                    )
            except QueueUnavailableError as error:
                check_cancelled()
                logger.warning("batch waits for Redis", id=self._claim.item, reason=str(error))
                await asyncio.sleep(self._context.pause)

    async def _input(self) -> InputFile:
        return await in_file_thread(InputFile, str(input_path(self._folder)))

    async def _answer(self, batch: Batch) -> None:
        """Send the lines without an answer until every line has one, or until the batch is cancelled or expires."""
        if batch.total is not None:
            answered = await self._with_disk(partial(self._find_answered, batch))
            writer = SegmentWriter(self._folder, self._context.store, self._claim, on_waiting=self._disk)
            writing = asyncio.create_task(writer.run())
            try:
                code = await self._answer_rest(batch, answered, writer, writing)
            finally:
                await _cancelled(writing)
        else:
            code = BatchCode.BATCH_CANCELLED
        ends_as = "expired" if code else "completed"
        # it may have been cancelled after its last answer, or its window may have ended
        if code == BatchCode.BATCH_CANCELLED or not await self._move(("in_progress",), "finalizing", ends_as=ends_as):
            await self._make_files(("cancelling",), "cancelled")

    async def _answer_rest(
        self, batch: Batch, answered: bytearray, writer: SegmentWriter, writing: "asyncio.Task[None]"
    ) -> BatchCode | None:
        """Return the error code of the lines without an answer; None if every line has one."""
        requests = self._requests(batch.record, num_left=answered.count(0), total=batch.total or 0)
        share = self._context.window.share()
        stopped = asyncio.Event()

        async def deliver(number: int, answer: LineAnswer) -> None:
            answered[number] = 1  # the writer writes the answer even if this task is cancelled
            self.moved_at = time.monotonic()
            self._context.metrics.batch_line("completed" if answer.is_success else "failed")
            await writer.add([answer])
            with contextlib.suppress(*REDIS_ERRORS):  # without Redis, the requests expire later by themselves
                await self._context.store.expire_requests(answer.request_ids)

        lines = self._unanswered(answered, stopped)
        sending = asyncio.create_task(answer_lines(lines, requests, share, deliver))
        looking = asyncio.create_task(self._until_stopped(batch.record, "in_progress"))
        try:
            await _first(sending, looking, writing)
            if sending.done():
                sending.result()
                if not answered.count(0):
                    return None
                await _first(looking, writing)
            code = looking.result()
            self._patient_until = min(self._patient_until, time.time() + _DISK_SECONDS)
            stopped.set()
            with contextlib.suppress(TimeoutError, HeadraceBrokerError):  # running requests end at their deadline
                async with asyncio.timeout(_STOP_SECONDS):
                    await requests.stop()
                    await _first(sending, writing)
            await _cancelled(sending)
            rest = asyncio.create_task(self._give_up(answered, code, writer))
            try:
                await _first(rest, writing)
            finally:
                await _cancelled(rest)
            return code
        finally:
            await _cancelled(sending)
            await _cancelled(looking)
            share.close()

    def _requests(self, record: BatchRecord, *, num_left: int, total: int) -> LineRequests:
        begin, end = float(record.created_at), float(record.expires_at)
        has_due_times = record.completion_window != SOONEST and end - begin >= LEAST_WINDOW and self._key.may_be_urgent
        due_times = DueTimes(begin, end, total=total, done=total - num_left) if has_due_times else None
        priority = max(self._context.priority, self._key.best_priority)
        return LineRequests(
            self._context.client,
            self._context.hub,
            self._context.models,
            secret=record.secret,
            key=replace(self._key, best_priority=priority),
            deadline=end,
            due_times=due_times,
            on_waiting=self._line_waits,
            bodies=self._context.bodies,
        )

    async def _find_answered(self, batch: Batch) -> bytearray:
        """Return one byte per line number: 0 if the line needs an answer, 1 if it is blank or has a committed one."""
        ids = await in_file_thread(lambda: set(answered_ids(self._folder, batch))) if batch.segments else set()
        reader = LineReader(self._context.bodies, self._key)
        with await self._input() as source:
            answered = bytearray()
            async for number, raw in source.read():
                answered.extend(b"\1" * (number + 1 - len(answered)))  # blank lines need no answer
                answered[number] = bool(ids) and (await reader.line(raw)).id in ids
        return answered

    async def _unanswered(self, answered: bytearray, stopped: asyncio.Event) -> AsyncIterator[tuple[int, BatchLine]]:
        reader = LineReader(self._context.bodies, self._key)
        with await self._input() as source:
            async for number, raw in source.read():
                if stopped.is_set():
                    return
                if not answered[number]:
                    yield number, await reader.line(raw)

    async def _until_stopped(self, record: BatchRecord, running: str) -> BatchCode:
        """Wait until the batch must stop, and return why. Wait at least `_LOOK_SECONDS`.

        In that time a replica that takes over a stopped batch attaches to the running requests, so that it can cancel
        them.
        """
        while True:
            check_cancelled()
            await asyncio.sleep(_LOOK_SECONDS)
            if time.time() >= record.expires_at:
                return BatchCode.BATCH_EXPIRED
            with contextlib.suppress(*REDIS_ERRORS):  # the next check is a second away
                status = await self._context.store.status(record.id)
                if status == "cancelling":
                    return BatchCode.BATCH_CANCELLED
                if status != running:
                    raise ClaimLostError(record.id)

    async def _give_up(self, answered: bytearray, code: BatchCode, writer: SegmentWriter) -> None:
        """Write an error for each line that has no answer."""
        rest: list[LineAnswer] = []
        async for _, line in self._unanswered(answered, asyncio.Event()):
            rest.append(LineAnswer(line.unanswered(code, _REASONS[code]), is_success=False))
            self._context.metrics.batch_line("cancelled" if code == BatchCode.BATCH_CANCELLED else "expired")
            if len(rest) == _REST_LINES:
                await writer.add(rest)
                rest = []
        await writer.add(rest)

    async def _make_files(self, before: tuple[str, ...], status: str) -> None:
        """Make the output file and the error file from the committed lines. No file is made that would be empty."""
        batch = await self._find()
        if batch is None:
            raise ClaimLostError(self._claim.item)
        if batch.total is not None and batch.done.completed + batch.done.failed < batch.total:
            logger.error("batch resumed, Redis had lost answers", id=self._claim.item)
            if batch.status == "finalizing":  # a cancelled batch is finished with the answers that it has
                await self._move(("finalizing",), "in_progress")
            return
        output, errors = await self._with_disk(partial(in_file_thread, self._assemble, batch))
        await self._move(before, status, output_file_id=output, error_file_id=errors)

    def _assemble(self, batch: Batch) -> list[str | None]:
        """Make the files and return their ids. A replica that repeats this makes files with the same ids."""
        made: list[str | None] = []
        for name, parts in zip(("output", "error"), committed_parts(self._folder, batch), strict=True):
            if not parts:
                made.append(None)
                continue
            secret = batch.record.secret.encode()
            digest = hashlib.blake2b(name.encode(), key=secret, digest_size=16).hexdigest()
            file = self._context.files.assemble(
                self._key,
                parts,
                filename=f"{batch.record.id}_{name}.jsonl",
                purpose="batch_output",
                kept_seconds=batch.record.output_seconds,
                file_id=f"file-{digest}",
            )
            made.append(file.id)
        return made

    def _disk(self, reason: str | None) -> None:
        """Record whether the disk is usable. Raises FileLostError if a stopped batch has waited too long for it."""
        if reason is not None and time.time() > self._patient_until:
            raise FileLostError(reason)
        if reason is not None and not self.waits_for_disk:
            logger.error("batch waiting for its files directory", id=self._claim.item, reason=reason)
        elif reason is None and self.waits_for_disk:
            logger.info("batch resumed", id=self._claim.item)
        self.waits_for_disk = reason is not None

    def _line_waits(self, reason: str) -> None:
        logger.debug("line waiting", batch=self._claim.item, reason=reason)

    async def _find(self) -> Batch | None:
        batch = await self._with_redis(partial(self._context.store.find, self._claim.item))
        if batch is not None:
            stopped_at = min(batch.record.expires_at, batch.times.get("cancelling", math.inf))
            self._patient_until = max(stopped_at, self._began_at) + _DISK_SECONDS
        return batch

    async def _move(self, before: tuple[str, ...], status: str, **fields: Any) -> bool:
        """Set the status. Return False if the batch no longer has a status in `before`; the caller reads it again."""
        return await self._with_redis(partial(self._context.store.move, self._claim, before, status, **fields))

    async def _with_redis(self, act: Callable[[], Awaitable[Value]]) -> Value:
        """Retry until Redis is available. A write whose reply was lost is repeated."""
        while True:
            try:
                return await act()
            except REDIS_ERRORS as error:
                check_cancelled()
                logger.warning("batch waiting for Redis", id=self._claim.item, reason=type(error).__name__)
                await asyncio.sleep(self._context.pause)

    async def _with_disk(self, act: Callable[[], Awaitable[Value]]) -> Value:
        """Retry until the directory of files is available and has room. Raises FileLostError."""
        while True:
            try:
                result = await act()
            except InputRefusedError:
                raise
            except (BatchError, OSError, FileLostError) as error:
                if await in_file_thread(self._has_lost, error):
                    raise FileLostError(str(error)) from None
                self._disk(str(error))
                await asyncio.sleep(self._context.pause)
                await self._find()
                check_cancelled()  # Python 3.11 can lose a cancellation that coincides with a reply of Redis
            else:
                self._disk(None)
                return result

    def _has_lost(self, error: Exception) -> bool:
        """Return whether files are gone for good: the directory is present, but the files are missing."""
        is_lost = isinstance(error, FileLostError) or is_missing(input_path(self._folder))
        return is_lost and not is_missing(self._folder.parent)


def input_path(folder: Path) -> Path:
    """Return the path of a batch's input in its folder."""
    return folder / "input.jsonl"


def keep_input(folder: Path, source: Path) -> None:
    """Link or copy the input into the batch's folder, so that the user may delete the file. Blocks; raises OSError."""
    folder.mkdir(mode=0o700, parents=True)
    try:
        try:
            os.link(source, input_path(folder))
        except OSError:  # some file systems have no hard links
            copy_to_disk(source, input_path(folder))
        sync_folder(folder)
        sync_folder(folder.parent)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


async def _first(*tasks: "asyncio.Task[Any]") -> None:
    """Wait for the first task to end; raise its error."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _cancelled(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.wait([task])
