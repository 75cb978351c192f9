"""The threads for files: a slow disk of one owner does not hold up the others, and a read takes one only briefly."""

import asyncio
import threading
from pathlib import Path

import pytest

from headrace_gateway.batch.input_file import InputFile
from headrace_gateway.errors import InputRefusedError
from headrace_gateway.files.threads import file_owner, in_file_thread


async def as_owner(owner: str, event: threading.Event) -> bool:
    file_owner.set(owner)
    return await in_file_thread(event.wait)


async def test_one_owner_cannot_hold_all_threads() -> None:
    ready, stuck = threading.Event(), threading.Event()
    ready.set()
    waiting = [asyncio.create_task(as_owner("a", stuck)) for _ in range(20)]
    try:
        assert await asyncio.create_task(as_owner("b", ready))
        waiting[0].cancel()  # its thread stays taken
        assert await asyncio.create_task(as_owner("b", ready))
    finally:
        stuck.set()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert await asyncio.create_task(as_owner("a", ready))  # and has its slots back


async def test_blank_lines_are_read_a_few_at_a_time_and_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"\n" * 100_000 + b"last")
    read: list[int] = []
    readline = InputFile._read_line

    def counted(file: InputFile) -> bytes:
        read.append(1)
        return readline(file)

    monkeypatch.setattr(InputFile, "_read_line", counted)
    with InputFile(str(path)) as source:
        with pytest.raises(InputRefusedError, match="more than 50000 lines"):
            await anext(source.read(max_lines=50_000))
        assert 50_000 < len(read) < 55_000
        assert [line async for line in source.read()] == list(source.lines()) == [(100_001, b"last")]
