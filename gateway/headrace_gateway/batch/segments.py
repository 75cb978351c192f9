"""`SegmentWriter`: writes the answers of one claim of a batch, and commits them.

Each claim writes segments of its own. A segment is a file of answers and a file of errors. A line is committed once it
is on the disk and Redis has recorded the length of the files. Redis accepts a length only from the claim that holds the
batch. Bytes that are not committed are never read, for example those of a replica that has lost its claim.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from headrace_broker.server.connections import REDIS_ERRORS
from headrace_gateway.background_task import check_cancelled
from headrace_gateway.batch.answer_file import AnswerFile
from headrace_gateway.batch.line_request import LineAnswer
from headrace_gateway.batch.record import Batch, Committed
from headrace_gateway.batch.store import BatchStore
from headrace_gateway.errors import BatchError
from headrace_gateway.files.stored_files import FileLostError, is_missing, sync_folder
from headrace_gateway.files.threads import start_in_file_thread
from headrace_gateway.redis.claims import Claim

_COMMIT_SECONDS: Final = 1.0
_COMMIT_LINES: Final = 64
_PAUSE_SECONDS: Final = 2.0

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class _Id(msgspec.Struct):
    id: str


_READ_ID: Final = msgspec.json.Decoder(_Id)


class SegmentWriter:
    """Run `run` as a task beside the callers of `add`. It waits for as long as the disk or Redis is unavailable.

    Args:
        folder: the folder of the batch.
        on_waiting: called with the reason each time that a write fails, and with None when writing works again.
    """

    def __init__(
        self,
        folder: Path,
        store: BatchStore,
        claim: Claim,
        *,
        on_waiting: Callable[[str | None], None],
    ) -> None:
        self._folder: Final = folder
        self._store: Final = store
        self._claim: Final = claim
        self._on_waiting: Final = on_waiting
        self._waiting: list[tuple[list[LineAnswer], asyncio.Future[None]]] = []
        self._num_waiting = 0
        self._has_any: Final = asyncio.Event()
        self._has_many: Final = asyncio.Event()
        self._segment: _Segment | None = None

    async def add(self, answers: list[LineAnswer]) -> None:
        """Write answers. When `add` returns, these answers and all that were added before are committed.

        They are written even if the caller is cancelled.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((answers, written))
        self._num_waiting += len(answers)
        self._has_any.set()
        if self._num_waiting >= _COMMIT_LINES:
            self._has_many.set()
        await written

    async def run(self) -> None:
        """Write the added answers, about once a second. Raises ClaimLostError and FileLostError."""
        try:
            while True:
                await self._has_any.wait()
                with contextlib.suppress(TimeoutError):  # a second has passed: write the answers so far
                    async with asyncio.timeout(_COMMIT_SECONDS):
                        await self._has_many.wait()
                await self.flush()
                check_cancelled()  # Python 3.11 can lose a cancellation that coincides with a reply of Redis
        finally:
            if self._segment is not None:
                self._segment.close()

    async def flush(self) -> None:
        """Write and commit the pending answers. Raises ClaimLostError."""
        taken, self._waiting, self._num_waiting = self._waiting, [], 0
        self._has_any.clear()
        self._has_many.clear()
        answers = [answer for some, _ in taken for answer in some]
        if answers:
            segment, committed = await self._write(answers)
            await self._commit(segment.name, committed)
            segment.committed = committed
        for _, written in taken:
            if not written.done():
                written.set_result(None)

    async def _write(self, answers: Sequence[LineAnswer]) -> tuple["_Segment", Committed]:
        while True:
            try:
                self._segment = self._segment or await _in_thread(_Segment.begin, self._folder, self._claim)
                committed = await _in_thread(self._segment.write, answers)
            except (BatchError, OSError) as error:
                if await _in_thread(is_missing, self._folder) and not await _in_thread(is_missing, self._folder.parent):
                    raise FileLostError(str(error)) from None
                # unflushed bytes may or may not reach the disk later, so these answers go into new files
                await self._drop_segment()
                self._on_waiting(str(error))
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                self._on_waiting(None)
                return self._segment, committed

    async def _drop_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            with contextlib.suppress(OSError):  # its committed bytes are on the disk
                await _in_thread(segment.drop)

    async def _commit(self, segment: str, committed: Committed) -> None:
        while True:
            try:
                await self._store.commit(self._claim, segment, committed)
            except REDIS_ERRORS as error:  # a write whose reply was lost is repeated
                check_cancelled()
                logger.warning("batch not committed", id=self._claim.item, reason=type(error).__name__)
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                return


class _Segment:
    """The two files of a segment. Methods block, and raise BatchError or OSError."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name: Final = name
        self.committed = Committed()
        self._paths: Final = paths_of(folder, name)
        self._output, self._errors = (AnswerFile(str(path), mode=0o600) for path in self._paths)

    @classmethod
    def begin(cls, folder: Path, claim: Claim) -> "_Segment":
        return cls(folder, f"{claim.token:016d}-{secrets.token_hex(8)}")

    def write(self, answers: Sequence[LineAnswer]) -> Committed:
        """Append answers and flush them to the disk. Return the lengths and counts to commit."""
        succeeded = [answer for answer in answers if answer.is_success]
        failed = [answer for answer in answers if not answer.is_success]
        for file, some in ((self._output, succeeded), (self._errors, failed)):
            if some:
                file.append(b"".join(answer.line for answer in some))
                file.sync()
        if (succeeded and not self.committed.output_bytes) or (failed and not self.committed.error_bytes):
            sync_folder(self._paths[0].parent)
        total = self.committed.plus(
            Committed(
                output_bytes=sum(len(answer.line) for answer in succeeded),
                error_bytes=sum(len(answer.line) for answer in failed),
                completed=len(succeeded),
                failed=len(failed),
            )
        )
        for answer in succeeded:
            total = total.plus(_usage(answer.usage or {}))
        return total

    def drop(self) -> None:
        """Close the files. Delete them if none of their bytes are committed."""
        self.close()
        if self.committed == Committed():
            for path in self._paths:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._output.close()
        self._errors.close()


def _usage(usage: Mapping[str, Any]) -> Committed:
    """Return the token counts of the `usage` of a completion or of a response."""
    before, after = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    return Committed(
        input_tokens=usage.get(f"{before}_tokens", 0),
        cached_tokens=(usage.get(f"{before}_tokens_details") or {}).get("cached_tokens") or 0,
        output_tokens=usage.get(f"{after}_tokens", 0),
        reasoning_tokens=(usage.get(f"{after}_tokens_details") or {}).get("reasoning_tokens") or 0,
    )


def paths_of(folder: Path, segment: str) -> tuple[Path, Path]:
    """Return the two files of a segment: answers and errors."""
    return folder / f"{segment}.output.jsonl", folder / f"{segment}.errors.jsonl"


def committed_parts(folder: Path, batch: Batch) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    """Return the files that make up the output and the errors of a batch, each with its committed length in bytes."""
    outputs, errors = [], []
    for name, committed in batch.segments.items():
        output, error = paths_of(folder, name)
        outputs += [(output, committed.output_bytes)] if committed.output_bytes else []
        errors += [(error, committed.error_bytes)] if committed.error_bytes else []
    return outputs, errors


def answered_ids(folder: Path, batch: Batch) -> Iterator[str]:
    """Yield the ids of all committed lines. Blocks; raises OSError and FileLostError."""
    for parts in committed_parts(folder, batch):
        for path, size in parts:
            try:
                lines = path.open("rb")
            except FileNotFoundError:
                raise FileLostError(f"{path.name} is missing") from None
            with lines:
                while size > 0 and (line := lines.readline()):
                    size -= len(line)
                    yield _READ_ID.decode(line).id


async def _in_thread(act: Callable[..., Any], *args: Any) -> Any:
    """Run `act` in a thread to completion, even if this task is cancelled. So no file is closed while it is in use."""
    running = start_in_file_thread(act, *args)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
