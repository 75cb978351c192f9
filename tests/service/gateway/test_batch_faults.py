"""Batches in the test's own process, on a real server, where parts of it have failed."""

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import redis

from headrace_broker.connections import connect_async
from headrace_broker.embedded import EmbeddedServer
from headrace_gateway.batch.batch_record import BatchRecord
from headrace_gateway.batch.batch_runner import BatchRunner
from headrace_gateway.batch.batch_store import BatchStore
from headrace_gateway.batch.batch_work import BatchTools
from headrace_gateway.batch.window import SharedWindow
from headrace_gateway.files.stored_files import StoredFiles
from headrace_gateway.keys import ANYONE


@pytest.fixture
async def tools(redis_server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[BatchTools]:
    """Of a replica that shares the directory and Redis; nothing answers its lines."""
    async with connect_async(redis_server.url) as client:
        yield BatchTools(
            client=Mock(),
            hub=Mock(),
            models=Mock(),
            store=BatchStore(client),
            files=StoredFiles(tmp_path / "files"),
            window=SharedWindow(16),
            metrics=Mock(),
            priority=9,
            announce=AsyncMock(),
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
    """A folder of a batch that nobody has touched for long."""
    folder = files.batch_folder(ANYONE, f"batch_{number:032x}")
    folder.mkdir()
    os.utime(folder, (100.0, 100.0))
    return folder


async def test_folders_of_batches_that_this_redis_knows_nothing_of_are_swept(tools: BatchTools) -> None:
    await tools.store.create(record_of(1))
    known, unknown = old_folder(tools.files, 1), old_folder(tools.files, 2)
    await BatchRunner(tools).sweep()
    assert (known.exists(), unknown.exists()) == (True, False)


@pytest.mark.parametrize("has_batches", [True, False])
async def test_a_gateway_on_another_redis_deletes_no_folder_of_a_batch(
    tools: BatchTools, redis_client: "redis.Redis", has_batches: bool
) -> None:
    await tools.store.create(record_of(1))
    gone = old_folder(tools.files, 3)
    await BatchRunner(tools).sweep()
    assert not gone.exists()
    folder = old_folder(tools.files, 1)
    redis_client.flushall()
    if has_batches:
        await tools.store.redis_id("another")
    await BatchRunner(tools).sweep()
    assert folder.exists()
