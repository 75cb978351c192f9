"""Batches in the test's own process, on a real server, with partial failures."""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import redis

from headrace_broker.server.connections import connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_gateway.batch import runner as batch_runner
from headrace_gateway.batch import store as batch_store
from headrace_gateway.batch import work as batch_work
from headrace_gateway.batch.line import read_line
from headrace_gateway.batch.line_request import LineAnswer
from headrace_gateway.batch.record import BatchRecord
from headrace_gateway.batch.runner import BatchRunner
from headrace_gateway.batch.segments import SegmentWriter
from headrace_gateway.batch.store import MOST_OPEN, BatchStore
from headrace_gateway.batch.window import SharedWindow
from headrace_gateway.batch.work import BatchContext, BatchWork, keep_input
from headrace_gateway.errors import ApiError
from headrace_gateway.files.stored_files import StoredFiles
from headrace_gateway.keys.api_key import ANYONE
from headrace_gateway.redis.claims import Claim
from headrace_gateway.requests.body_process import BodyProcess
from service.gateway.gateway_process import PATIENCE


async def never(*_: Any) -> None:
    await asyncio.Event().wait()


@pytest.fixture
async def context(redis_server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[BatchContext]:
    """Return the context of a replica that shares the directory and Redis. Nothing answers its lines."""
    async with connect_async(redis_server.url) as client:
        yield BatchContext(
            client=Mock(),
            hub=Mock(),
            models=Mock(find=AsyncMock(side_effect=never)),
            store=BatchStore(client, AsyncStreamServers(client, {}, 600)),
            files=StoredFiles(tmp_path / "files"),
            bodies=BodyProcess(),
            window=SharedWindow(16),
            metrics=Mock(),
            priority=9,
            publish=AsyncMock(),
            pause=0.01,
        )


def record_of(number: int = 1, **changes: Any) -> BatchRecord:
    now = int(time.time())
    fields: dict[str, Any] = {
        "id": f"batch_{number:032x}",
        "key": ANYONE.name,
        "tenant": None,
        "best_priority": 9,
        "models": None,
        "endpoint": "/v1/completions",
        "input_file_id": "file-1",
        "completion_window": "24h",
        "created_at": now,
        "expires_at": now + 86_400,
        "metadata": None,
        "output_seconds": 3600,
        "secret": "secret",
    }
    return BatchRecord(**{**fields, **changes})


def old_folder(files: StoredFiles, number: int) -> Path:
    """Return the folder of a batch that has not changed for long."""
    folder = files.folder(ANYONE) / f"batch_{number:032x}"
    folder.mkdir()
    os.utime(folder, (100.0, 100.0))
    return folder


async def test_folders_of_batches_unknown_to_this_redis_are_swept(context: BatchContext) -> None:
    await context.store.create(record_of(1))
    known, unknown = old_folder(context.files, 1), old_folder(context.files, 2)
    await BatchRunner(context).sweep()
    assert (known.exists(), unknown.exists()) == (True, False)


@pytest.mark.parametrize("has_batches", [True, False])
async def test_a_gateway_on_another_redis_deletes_no_folder_of_a_batch(
    context: BatchContext, redis_client: "redis.Redis", has_batches: bool
) -> None:
    await context.store.create(record_of(1))
    gone = old_folder(context.files, 3)
    await BatchRunner(context).sweep()
    assert not gone.exists()
    folder = old_folder(context.files, 1)
    redis_client.flushall()
    if has_batches:
        await context.store.redis_id("another")
    await BatchRunner(context).sweep()
    assert folder.exists()


async def begun(context: BatchContext, total: int = 2, answered: int = 0, **changes: Any) -> tuple[BatchRecord, Claim]:
    """Return a batch whose input is checked, with its committed answers."""
    record = record_of(**changes)
    bodies = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}
        for number in range(total)
    ]
    lines = [json.dumps(body).encode() + b"\n" for body in bodies]
    folder = context.files.folder(ANYONE)
    (folder / "in").write_bytes(b"".join(lines))
    keep_input(folder / record.id, folder / "in")
    (folder / "in").unlink()
    await context.store.create(record)
    (claim,) = await context.store.claims.take(1)
    await context.store.move(claim, ("validating",), "in_progress", total=total)
    if answered:
        await commit(context, claim, lines[:answered])
    return record, claim


async def commit(context: BatchContext, claim: Claim, lines: list[bytes]) -> None:
    """Write an answer for each of these lines."""
    folder = context.files.batch_folder(ANYONE, claim.item)
    writer = SegmentWriter(folder, context.store, claim, on_waiting=lambda _: None)
    answers = [LineAnswer(read_line(line).answered(200, f"cmpl-{line!r}", {}), True) for line in lines]
    added = asyncio.create_task(writer.add(answers))
    await asyncio.sleep(0)
    await writer.flush()
    await added


def outputs(context: BatchContext) -> list[str]:
    """Return the custom ids of all lines in the batches' files."""
    paths = [path for path in context.files.folder(ANYONE).glob("file-*") if path.suffix != ".json"]
    return sorted(json.loads(line)["custom_id"] for path in paths for line in path.read_bytes().splitlines())


@pytest.mark.parametrize(("answered", "seconds"), [(2, 86_400), (0, -1)])
async def test_a_batch_can_be_cancelled_even_after_its_last_answer_or_its_window(
    context: BatchContext, answered: int, seconds: int
) -> None:
    record, claim = await begun(context, answered=answered, expires_at=int(time.time()) + seconds)
    await context.store.cancel(record.id)
    async with asyncio.timeout(PATIENCE):
        await BatchWork(context, claim).run()
    assert await context.store.status(record.id) == "cancelled"
    assert outputs(context) == ["0", "1"]


async def test_a_batch_without_progress_pauses_before_a_retry(context: BatchContext) -> None:
    _, claim = await begun(context, answered=2)
    store = AsyncMock(wraps=context.store, claims=context.store.claims)
    store.move.side_effect = [False] * 1000  # Redis replies so if it has lost what was just written
    work = BatchWork(dataclasses.replace(context, store=store, pause=600.0), claim)
    running = asyncio.create_task(work.run())
    try:
        async with asyncio.timeout(PATIENCE):
            while store.move.await_count < 2:
                await asyncio.sleep(0.01)
        await asyncio.wait([running], timeout=0.5)
        assert store.move.await_count == 2
    finally:
        running.cancel()


class WorkOfMany:
    """A fake `BatchWork` that counts the concurrent tasks of a batch."""

    def __init__(self) -> None:
        self.moved_at = time.monotonic()
        self.waits_for_disk = False
        self.num_begun = self.num_running = self.most_running = 0

    async def run(self) -> None:
        self.num_begun += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.Event().wait()
        finally:
            self.num_running -= 1


async def reach(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(context: BatchContext) -> AsyncIterator[None]:
    task = asyncio.create_task(BatchRunner(context).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_replica_never_has_two_tasks_for_one_batch(
    context: BatchContext, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    work = WorkOfMany()
    monkeypatch.setattr(batch_runner, "BatchWork", lambda *_: work)
    record = record_of()
    await context.store.create(record)
    async with running(context):
        await reach(lambda: work.num_begun == 1)
        redis_client.zadd(context.store.claims.due_key, {record.id: 0})  # as before it was claimed
        await reach(lambda: work.num_begun == 2)
    assert work.most_running == 1


def fields_of(context: BatchContext, client: "redis.Redis", batch_id: str) -> tuple[str, str, dict[bytes, bytes]]:
    """Return Redis's keys of a batch and of the claims."""
    key = f"headrace:gw:batch:{batch_id}"
    return key, context.store.claims.due_key, client.hgetall(key)


async def test_a_batch_ends_again_if_redis_lost_its_end(context: BatchContext, redis_client: "redis.Redis") -> None:
    record, claim = await begun(context, answered=2)
    key, due_key, before = fields_of(context, redis_client, record.id)
    await BatchWork(context, claim).run()
    assert await context.store.status(record.id) == "completed"
    redis_client.delete(key)
    redis_client.hset(key, mapping=before)
    for ending in range(2):  # the second time it is taken, it has ended
        redis_client.zadd(due_key, {record.id: 0})
        (claim,) = await context.store.claims.take(1)
        await BatchWork(context, claim).run()
        assert await context.store.status(record.id) == "completed"
        assert outputs(context) == ["0", "1"]
        assert context.files.batch_folder(ANYONE, record.id).exists() == (ending == 0)
    assert redis_client.zcard(due_key) == 0


@pytest.mark.parametrize("lost", ["folder", "segment"])
async def test_a_batch_whose_files_are_lost_fails(context: BatchContext, lost: str) -> None:
    record, claim = await begun(context, answered=1)
    folder = context.files.batch_folder(ANYONE, record.id)
    for path in folder.glob("*.output.jsonl"):
        path.unlink()
    if lost == "folder":
        shutil.rmtree(folder)
    async with asyncio.timeout(PATIENCE):
        await BatchWork(context, claim).run()
    batch = await context.store.find(record.id)
    assert batch is not None
    assert batch.status == "failed"
    assert [error["code"] for error in batch.errors or ()] == ["files_lost"]


async def test_a_batch_waits_while_the_directory_is_unavailable(context: BatchContext, tmp_path: Path) -> None:
    record, claim = await begun(context, answered=2)
    (tmp_path / "files").rename(tmp_path / "away")
    work = BatchWork(context, claim)
    running = asyncio.create_task(work.run())
    await reach(lambda: work.waits_for_disk)
    (tmp_path / "away").rename(tmp_path / "files")
    async with asyncio.timeout(PATIENCE):
        await running
    assert await context.store.status(record.id) == "completed"
    assert outputs(context) == ["0", "1"]


async def run_without_directory(context: BatchContext, record: BatchRecord, tmp_path: Path) -> "asyncio.Task[None]":
    """Run a batch whose directory has gone away, until it waits for it."""
    keep_input(context.files.folder(ANYONE) / record.id, Path(__file__))
    await context.store.create(record)
    (claim,) = await context.store.claims.take(1)
    (tmp_path / "files").rename(tmp_path / "away")
    work = BatchWork(context, claim)
    running = asyncio.create_task(work.run())
    await reach(lambda: work.waits_for_disk)
    return running


@pytest.mark.parametrize(("stop", "status"), [("cancel", "cancelled"), ("expire", "expired")])
async def test_a_batch_that_waits_for_its_directory_to_be_checked_can_end(
    context: BatchContext, tmp_path: Path, stop: str, status: str
) -> None:
    record = record_of(expires_at=int(time.time()) + (0 if stop == "expire" else 600))
    running = await run_without_directory(context, record, tmp_path)
    if stop == "cancel":
        await context.store.cancel(record.id)
    async with asyncio.timeout(PATIENCE):
        await running
    assert await context.store.status(record.id) == status


async def test_a_batch_ends_if_a_reply_of_redis_hides_the_cancellation_of_its_check(
    context: BatchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of()
    running = await run_without_directory(context, record, tmp_path)

    async def hide(item: str) -> Any:
        monkeypatch.undo()
        with contextlib.suppress(asyncio.CancelledError):
            await never()
        return await context.store.find(item)

    monkeypatch.setattr(context.store, "find", hide)
    await context.store.cancel(record.id)
    async with asyncio.timeout(PATIENCE):
        await running
    assert await context.store.status(record.id) == "cancelled"


async def test_a_cancelled_batch_does_not_wait_for_ever_for_its_directory(
    context: BatchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_work, "_DISK_SECONDS", 0.0)
    record, claim = await begun(context, answered=1)
    (tmp_path / "files").rename(tmp_path / "away")
    work = BatchWork(context, claim)
    running = asyncio.create_task(work.run())
    await reach(lambda: work.waits_for_disk)
    await context.store.cancel(record.id)
    async with asyncio.timeout(PATIENCE):
        await running
    assert await context.store.status(record.id) == "failed"


async def test_the_open_and_the_stored_batches_of_a_key_are_limited(
    context: BatchContext, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "_MOST_KEPT", MOST_OPEN + 1)
    for number in range(MOST_OPEN):
        await context.store.create(record_of(number))
    with pytest.raises(ApiError) as refused:
        await context.store.create(record_of(MOST_OPEN))
    assert (refused.value.status, refused.value.code) == (429, "too_many_batches")
    await context.store.create(record_of(100, key="other"))
    for number in range(MOST_OPEN, MOST_OPEN + 3):  # each cancelled one makes room
        await context.store.cancel(record_of(number - MOST_OPEN).id)
        await context.store.create(record_of(number))
    kept = await context.store.list(ANYONE, None, 100)
    assert kept is not None
    numbers = {int(batch.record.id[-32:], 16) for batch in kept}
    assert numbers == set(range(2, MOST_OPEN + 3))
    assert not redis_client.exists(f"headrace:gw:batch:{record_of(0).id}")


async def test_a_batch_that_nobody_has_begun_is_cancelled_at_once(context: BatchContext) -> None:
    for number in (1, 2):
        await context.store.create(record_of(number))
    (claim,) = await context.store.claims.take(1)
    for number, status in ((1, "cancelling"), (2, "cancelled")):
        await context.store.cancel(record_of(number).id)
        assert await context.store.status(record_of(number).id) == status
    assert claim.item == record_of(1).id


async def test_the_batches_of_one_key_do_not_delay_those_of_another(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def begin(_: BatchContext, claim: Claim) -> WorkOfMany:
        begun.append(claim.item)
        return WorkOfMany()

    monkeypatch.setattr(batch_runner, "BatchWork", begin)
    monkeypatch.setattr(batch_runner, "_POLL_SECONDS", 0.0)
    for number in range(12):
        await context.store.create(record_of(number))
    await context.store.create(record_of(100, key="other"))
    async with running(context):
        await reach(lambda: record_of(100).id in begun)
    assert len(begun) == 9


@pytest.mark.parametrize("status", ["finalizing", "cancelling"])
async def test_a_batch_does_not_end_while_answers_are_missing_that_redis_has_lost(
    context: BatchContext, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr(batch_work, "_STOP_SECONDS", 0.01)
    record, claim = await begun(context, answered=2, expires_at=int(time.time()) - 1)
    if status == "finalizing":
        await context.store.move(claim, ("in_progress",), status, ends_as="completed")
    else:
        await context.store.cancel(record.id)
    key, _, fields = fields_of(context, redis_client, record.id)
    num_found = 0

    async def find(batch_id: str) -> Any:
        nonlocal num_found
        num_found += 1
        if num_found == 2:  # before it makes its files
            redis_client.hdel(key, *(name for name in fields if name.startswith(b"seg:")))
        return await context.store.find(batch_id)

    store = AsyncMock(wraps=context.store, claims=context.store.claims)
    store.find.side_effect = find
    async with asyncio.timeout(PATIENCE):
        await BatchWork(dataclasses.replace(context, store=store), claim).run()
    batch = await context.store.find(record.id)
    assert batch is not None
    assert batch.status == ("expired" if status == "finalizing" else "cancelled")
    assert (batch.done.completed, batch.done.failed) == (0, 2)
    assert outputs(context) == ["0", "1"]


async def test_batches_are_taken_while_a_slow_directory_is_swept(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def sweep() -> list[Path]:
        begun.set()
        goes_on.wait(PATIENCE)
        return []

    work = WorkOfMany()
    monkeypatch.setattr(batch_runner, "BatchWork", lambda *_: work)
    files = Mock(wraps=context.files, sweep=sweep)
    try:
        async with running(dataclasses.replace(context, files=files)):
            await reach(begun.is_set)
            await context.store.create(record_of())
            await reach(lambda: work.num_begun == 1)
    finally:
        goes_on.set()


async def test_an_input_is_opened_and_read_in_threads(context: BatchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    opened = batch_work.InputFile

    def open_input(name: str) -> Any:
        threads.append(threading.get_ident())
        return opened(name)

    monkeypatch.setattr(batch_work, "InputFile", open_input)
    record, claim = await begun(context, expires_at=int(time.time()) - 1)
    await BatchWork(context, claim).run()
    assert await context.store.status(record.id) == "expired"
    assert threads
    assert threading.get_ident() not in threads
