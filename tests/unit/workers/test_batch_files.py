"""The files of a batch: which lines are read and written, and how a run resumes after a kill."""

import itertools
import json
import os
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_broker import LoadingModel
from headrace_cli.batch.batch_run import RunFile
from headrace_gateway.batch.answer_file import AnswerFile
from headrace_gateway.batch.input_file import InputFile
from headrace_gateway.batch.line import MAX_LINE_BYTES, read_line
from headrace_gateway.batch.validation import KnownLine, check_input, find_answered
from headrace_gateway.errors import BatchError, InputRefusedError
from headrace_gateway.keys.model_catalog import ModelCatalog
from unit.gateway.bodies import CHAT, model


def request(custom_id: str, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": CHAT, **more}


def written(path: Path, *lines: Any) -> str:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return str(path)


class Models:
    """A client with one registered model, and one that its first worker is loading."""

    async def models(self) -> dict[str, Any]:
        return {"m": model()}

    async def loading_models(self) -> dict[str, Any]:
        return {"new": LoadingModel("new", 0.4, 9.0, frozenset({"w"}))}


async def check(name: str) -> dict[str, KnownLine]:
    with InputFile(name) as source:
        return (await check_input(source, ModelCatalog(Models()))).lines  # type: ignore[arg-type]


def answer_to(custom_id: str) -> bytes:
    return read_line(json.dumps(request(custom_id)).encode()).answered(200, "chatcmpl-1", {"id": "x"})


def known_of(*custom_ids: str) -> dict[str, KnownLine]:
    lines = (read_line(json.dumps(request(custom_id)).encode()) for custom_id in custom_ids)
    return {line.custom_id: KnownLine(number, line.id) for number, line in enumerate(lines, 1)}


def answered(path: Path, *custom_ids: str, is_ours: bool = True) -> set[str]:
    file = AnswerFile(str(path))
    file.open()
    try:
        return find_answered(file, known_of(*custom_ids), is_ours=is_ours)
    finally:
        file.close()


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    name = written(tmp_path / "in", "", request("a"), "  \r", request("b"))
    with InputFile(name) as source:
        assert [number for number, _ in source.lines()] == [2, 4]
        assert [number for number, _ in source.lines()] == [2, 4]


async def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(BOM_UTF8 + json.dumps(request("a")).encode() + b"\n")
    assert list(await check(str(path))) == ["a"]


async def test_a_strict_gateway_refuses_lines_with_ignored_fields(tmp_path: Path) -> None:
    line = request("a", body={**CHAT, "chat_id": "7"})
    with InputFile(written(tmp_path / "in", line)) as source, pytest.raises(InputRefusedError) as refusal:
        await check_input(source, ModelCatalog(Models()), strict=True)  # type: ignore[arg-type]
    assert (refusal.value.problems[0].code, refusal.value.problems[0].param) == ("unsupported_parameter", "chat_id")


async def test_a_line_for_a_model_that_is_loading_says_so(tmp_path: Path) -> None:
    lines = [request(name, body={**CHAT, "model": name}) for name in ("new", "none")]
    with pytest.raises(InputRefusedError) as refused:
        await check(written(tmp_path / "in", *lines))
    loading, unknown = refused.value.problems
    assert (loading.code, unknown.code) == ("model_not_found", "model_not_found")
    assert "'new' is loading (40%)" in loading.message
    assert "no worker has registered it" in unknown.message


async def test_a_line_that_is_too_long_is_refused_and_the_next_one_is_read(tmp_path: Path) -> None:
    name = written(tmp_path / "in", " " * 2 * MAX_LINE_BYTES + "x" * MAX_LINE_BYTES, request("b"))
    with pytest.raises(InputRefusedError) as refused:
        await check(name)
    assert [(problem.line, problem.code) for problem in refused.value.problems] == [(1, "line_too_large")]


async def test_all_lines_are_known_by_their_custom_ids(tmp_path: Path) -> None:
    known = await check(written(tmp_path / "in", request("a"), request("b")))
    assert known == known_of("a", "b")


async def test_a_repeated_custom_id_is_refused_with_both_line_numbers(tmp_path: Path) -> None:
    with pytest.raises(InputRefusedError, match="line 3: custom_id 'a' is already used in line 1"):
        await check(written(tmp_path / "in", request("a"), request("b"), request("a")))


async def test_an_empty_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefusedError, match="it has no lines") as refused:
        await check(written(tmp_path / "in", "", ""))
    assert refused.value.problems[0].code == "empty_file"


async def test_the_first_of_many_problems_are_reported_and_all_are_counted(tmp_path: Path) -> None:
    with pytest.raises(InputRefusedError, match="and 10 more") as refused:
        await check(written(tmp_path / "in", *["{"] * 30))
    assert [problem.line for problem in refused.value.problems] == list(range(1, 21))


async def test_an_input_that_cannot_be_read_twice_is_copied(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, json.dumps(request("a")).encode())
    os.close(write_end)
    try:
        assert set(await check(f"/dev/fd/{read_end}")) == {"a"}
    finally:
        os.close(read_end)


def test_a_missing_input_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="cannot be read: No such file"):
        InputFile(str(tmp_path / "none"))


def test_answers_are_found_again(tmp_path: Path) -> None:
    out = AnswerFile(str(tmp_path / "out"))
    for custom_id in ("a", "b"):
        out.append(answer_to(custom_id))
    out.close()
    assert answered(tmp_path / "out", "a", "b", "c") == {"a", "b"}


@given(st.integers(min_value=0))
def test_only_an_incomplete_last_line_is_removed(tmp_path_factory: pytest.TempPathFactory, kept: int) -> None:
    path = tmp_path_factory.mktemp("incomplete") / "out"
    lines = [answer_to("a"), answer_to("b")]
    whole = b"".join(lines)
    path.write_bytes(whole[: kept % (len(whole) + 1)])
    num_whole = path.read_bytes().count(b"\n")
    assert answered(path, "a", "b") == set(["a", "b"][:num_whole])
    assert path.read_bytes() == b"".join(lines[:num_whole])


def test_nothing_is_removed_from_a_file_that_no_run_created(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(answer_to("a") + b"precious")
    with pytest.raises(BatchError, match=r"line 2 of .*precious does not end"):
        answered(path, "a", is_ours=False)
    assert path.read_bytes().endswith(b"precious")


def test_a_file_without_answers_of_a_batch_is_refused(tmp_path: Path) -> None:
    name = written(tmp_path / "in", request("a"))
    with pytest.raises(BatchError, match=r"line 1 of .*in is not an answer of a batch"):
        answered(Path(name), "a")


def test_an_answer_of_another_request_with_the_same_custom_id_is_refused(tmp_path: Path) -> None:
    other = read_line(json.dumps(request("a", body={**CHAT, "seed": 1})).encode())
    (tmp_path / "out").write_bytes(other.answered(200, "chatcmpl-1", {}))
    with pytest.raises(BatchError, match="answers a request with the custom_id 'a' that differs"):
        answered(tmp_path / "out", "a")


def test_a_second_answer_of_one_request_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(answer_to("a") * 2)
    with pytest.raises(BatchError, match=r"line 2 of .* the custom_id 'a' a second time"):
        answered(tmp_path / "out", "a")


def test_a_file_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    first, second = AnswerFile(str(tmp_path / "out")), AnswerFile(str(tmp_path / "out"))
    first.open()
    with pytest.raises(BatchError, match="another run writes"):
        second.open()
    first.close()


def test_a_line_that_does_not_fit_on_the_disk_is_removed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = AnswerFile(str(tmp_path / "out"))
    out.append(answer_to("a"))
    write = os.write

    def write_some(fd: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(fd, data[:20])

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(BatchError, match="cannot be written: No space left on device"):
        out.append(answer_to("b"))
    out.close()
    assert (tmp_path / "out").read_bytes() == answer_to("a")


def test_lines_reach_the_disk_once_a_second_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    ticks = itertools.count(0, 0.3)
    out = AnswerFile(str(tmp_path / "out"), now=lambda: next(ticks))
    for _ in range(8):
        out.append(answer_to("a"))
    assert len(synced) == 2
    out.sync()
    assert len(synced) == 3
    out.close()


def test_no_file_is_created_without_answers(tmp_path: Path) -> None:
    errors = AnswerFile(str(tmp_path / "errors"))
    errors.sync()
    errors.close()
    assert not (tmp_path / "errors").exists()


def test_a_resumed_run_has_the_secret_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "out.run"
    first = RunFile(path)
    first.begin()
    again = RunFile(path)
    assert (first.is_new, again.is_new) == (True, False)
    assert again.secret == first.secret
    assert path.stat().st_mode & 0o077 == 0
    again.delete()
    assert RunFile(path).secret != first.secret


def test_a_run_that_was_killed_before_it_wrote_its_secret_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "out.run"
    path.touch()
    run = RunFile(path)
    assert run.is_new
    run.begin()
    assert not RunFile(path).is_new


def test_a_file_that_is_not_a_run_file_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "out.run"
    path.write_text("#!/bin/sh\n")
    with pytest.raises(BatchError, match="is not a run file"):
        RunFile(path)
    assert path.read_text() == "#!/bin/sh\n"
