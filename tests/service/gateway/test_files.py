"""Files over HTTP: storage, access by key, and hostile uploads, which leave nothing behind."""

import asyncio
import json
import os
import resource
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.requests import ClientDisconnect

from headrace_broker.server.embedded import EmbeddedServer
from headrace_gateway.files import endpoints as files_endpoint
from headrace_gateway.files.stored_files import PartialFile, StoredFiles
from headrace_gateway.files.threads import start_in_file_thread
from headrace_gateway.keys.api_key import ANYONE
from service.gateway.gateway_process import PATIENCE
from service.gateway.in_process import bearer, running_app, write_keys

FORM = {"Content-Type": "multipart/form-data; boundary=x"}
LINE = b'{"custom_id": "a"}\n'


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def form(content: bytes = LINE, filename: str = "in.jsonl", purpose: bytes = b"batch", *more: bytes) -> bytes:
    file = part("file", content, f'; filename="{filename}"')
    return b"".join([part("purpose", purpose), *more, file, b"--x--\r\n"])


def kept(folder: Path) -> list[str]:
    """Return the names of everything in the directory, except for the keys' folders."""
    return sorted(path.name for path in folder.glob("*/*"))


@pytest.fixture
async def client(redis_server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    options = {"files": tmp_path / "files", "max_file_bytes": 100_000, "max_kept_bytes": 150_000}
    async with running_app(redis_server.url, **options) as (_, client):
        yield client


async def upload(client: httpx2.AsyncClient, body: bytes | None = None, **headers: str) -> httpx2.Response:
    return await client.post("/v1/files", content=form() if body is None else body, headers={**FORM, **headers})


def code_of(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_file_is_stored_listed_read_and_deleted(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    made = (await upload(client)).json()
    assert made["bytes"] == len(LINE)
    assert made["expires_at"] == made["created_at"] + 30 * 86_400
    content = await client.get(f"/v1/files/{made['id']}/content")
    assert (content.content, content.headers["content-type"]) == (LINE, "application/octet-stream")
    assert (await client.get(f"/v1/files/{made['id']}")).json() == made
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "files").glob("**/*")}
    assert set(modes.values()) == {"0o600", "0o700"}
    assert (await client.delete(f"/v1/files/{made['id']}")).json() == {
        "id": made["id"],
        "object": "file",
        "deleted": True,
    }
    assert kept(tmp_path / "files") == []
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert code_of(await client.request(method, f"/v1/files/{made['id']}{path}")) == (404, "not_found")


async def test_a_list_is_read_page_by_page_in_both_orders(client: httpx2.AsyncClient) -> None:
    ids = {(await upload(client)).json()["id"] for _ in range(5)}
    for order in ("asc", "desc"):
        found: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = (await client.get("/v1/files", params={"limit": "2", "order": order, **after})).json()
            found += [file["id"] for file in page["data"]]
            after = {"after": page["last_id"]}
            if not page["has_more"]:
                break
        assert len(found) == 5
        assert set(found) == ids
    assert (await client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
    for params in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "file-1"}):
        assert (await client.get("/v1/files", params=params)).status_code == 400


async def test_a_name_is_shown_and_is_never_a_path(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    for given, shown in (("../../etc/passwd", "passwd"), ("a\\b.jsonl", "a\\b.jsonl"), ("/", "upload"), ("é\x00", "é")):
        made = (await upload(client, form(filename=given))).json()
        assert made["filename"] in (shown, shown.rpartition("\\")[2]), given
    assert not list(tmp_path.glob("*passwd"))
    assert {path.parent.parent for path in (tmp_path / "files").glob("**/file-*")} == {tmp_path / "files"}


@pytest.mark.parametrize(
    "path", ["..", "../x", "file-" + "0" * 31, "file-" + "0" * 32 + ".json", "%2e%2e%2f", "a" * 5000]
)
async def test_an_invalid_id_finds_nothing(client: httpx2.AsyncClient, path: str) -> None:
    await upload(client)
    for suffix in ("", "/content"):
        assert (await client.get(f"/v1/files/{path}{suffix}")).status_code == 404


@pytest.mark.parametrize(
    ("body", "headers", "refusal"),
    [
        (form(), {"Content-Type": "multipart/form-data"}, (400, "invalid_form")),
        (form(), {"Content-Type": f"multipart/form-data; boundary={'x' * 999}"}, (400, "invalid_form")),
        (form(), {"Content-Type": "application/json"}, (415, "unsupported_media_type")),
        (form(), {"Content-Encoding": "gzip"}, (415, "unsupported_media_type")),
        (b"", {}, (400, "invalid_form")),
        (b"nonsense", {}, (400, "invalid_form")),
        (form()[:-8], {}, (400, "invalid_form")),
        (b"--x--\r\n", {}, (400, "invalid_request")),
        (part("purpose", b"batch") + b"--x--\r\n", {}, (400, "invalid_request")),
        (form(purpose=b"fine-tune"), {}, (400, "unsupported_value")),
        (form()[:-7] + part("file", LINE, '; filename="b"') + b"--x--\r\n", {}, (400, "invalid_request")),
        (part("file", LINE) + b"--x--\r\n", {}, (400, "invalid_request")),
        (form(LINE, "a", b"batch", part("colour", b"red")), {}, (400, "unsupported_parameter")),
        (form(LINE, "a", b"x" * 300), {}, (400, "invalid_request")),
        (form(LINE, "a", b"batch", part("purpose", b"batch")), {}, (400, "invalid_request")),
        (form(LINE, "a", b"batch", part("expires_after[seconds]", b"3600")), {}, (400, "invalid_request")),
        (form(LINE, "a" * 9000), {}, (400, "invalid_form")),
        (part("purpose", b"batch", "\r\nX: " + "y" * 9000), {}, (400, "invalid_form")),
        (part("purpose", b"batch", "\r\nX: y" * 500), {}, (400, "invalid_form")),
        (b"--x\r\n\r\n\r\n" * 9 + b"--x--\r\n", {}, (400, "invalid_form")),
        (form(b"z" * 100_001), {}, (413, "request_too_large")),
    ],
)
async def test_a_hostile_upload_is_refused_and_leaves_nothing(
    client: httpx2.AsyncClient, tmp_path: Path, body: bytes, headers: dict[str, str], refusal: tuple[int, str]
) -> None:
    assert code_of(await upload(client, body, **headers)) == refusal
    assert kept(tmp_path / "files") == []


async def test_an_empty_file_and_one_as_large_as_allowed_are_kept(client: httpx2.AsyncClient) -> None:
    for content in (b"", b"z" * 100_000, b"--y\r\n--" * 9):
        made = (await upload(client, form(content))).json()
        assert made["bytes"] == len(content)
        assert (await client.get(f"/v1/files/{made['id']}/content")).content == content


async def test_a_file_expires_as_its_user_says(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    life = part("expires_after[anchor]", b"created_at") + part("expires_after[seconds]", b"3600")
    made = (await upload(client, form(LINE, "a", b"batch", life))).json()
    assert made["expires_at"] == made["created_at"] + 3600
    later = StoredFiles(tmp_path / "files", lambda: made["expires_at"])
    assert later.find(ANYONE, made["id"]) is None
    later.sweep()
    assert kept(tmp_path / "files") == []


async def test_the_bytes_that_a_key_stores_are_limited(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    made = (await upload(client, form(b"z" * 90_000))).json()
    assert code_of(await upload(client, form(b"z" * 90_000))) == (403, "storage_limit_exceeded")
    assert len(kept(tmp_path / "files")) == 2
    await client.delete(f"/v1/files/{made['id']}")
    assert (await upload(client, form(b"z" * 90_000))).status_code == 200


async def test_the_files_that_a_key_stores_are_limited_even_if_empty(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(150_000 // 4096 + 1):
        assert (await upload(client, form(b""))).status_code == 200
    assert code_of(await upload(client, form(b""))) == (403, "storage_limit_exceeded")
    listed = (await client.get("/v1/files")).json()["data"]
    for file in listed[2:]:
        await client.delete(f"/v1/files/{file['id']}")
    monkeypatch.setattr(files_endpoint, "MOST_FILES", 3)
    assert (await upload(client, form(b""))).status_code == 200
    assert code_of(await upload(client, form(b""))) == (403, "storage_limit_exceeded")


async def test_a_hanging_disk_does_not_block_the_gateways_other_threads(client: httpx2.AsyncClient) -> None:
    goes_on = threading.Event()
    hanging = [start_in_file_thread(goes_on.wait, PATIENCE) for _ in range(100)]
    try:
        blocked = asyncio.create_task(client.get("/v1/files"))
        async with asyncio.timeout(PATIENCE):
            for _ in range(20):
                assert await asyncio.to_thread(threading.get_ident)
        assert not blocked.done()
    finally:
        goes_on.set()
        await asyncio.wait(hanging)
    assert (await blocked).status_code == 200


async def test_a_batch_is_refused_if_its_key_has_no_room_for_the_input(
    client: httpx2.AsyncClient, tmp_path: Path
) -> None:
    made = (await upload(client, form(b"z" * 90_000))).json()
    body = {"input_file_id": made["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert code_of(await client.post("/v1/batches", json=body)) == (403, "storage_limit_exceeded")
    assert len(kept(tmp_path / "files")) == 2


@contextmanager
def room_for(most: int) -> Iterator[None]:
    """Limit the size of every file of this process, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_an_upload_to_a_full_disk_is_refused_and_leaves_nothing(
    client: httpx2.AsyncClient, tmp_path: Path
) -> None:
    for most in (1000, 100):  # the content does not fit, or its metadata does not
        with room_for(most):
            answer = await upload(client, form(b"z" * 50_000 if most == 1000 else b""))
        assert code_of(answer) == (507, "storage_full")
        assert answer.headers["x-should-retry"] == "false"
        assert kept(tmp_path / "files") == []


async def test_an_upload_whose_client_disconnects_is_not_stored(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    async def half() -> AsyncIterator[bytes]:
        yield form(b"z" * 50_000)[:40_000]
        raise ClientDisconnect

    assert code_of(await client.post("/v1/files", content=half(), headers=FORM)) == (400, "invalid_request")
    assert kept(tmp_path / "files") == []


async def test_an_upload_that_fails_is_discarded_in_a_thread(
    client: httpx2.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    discard = PartialFile.discard

    def noted(partial: PartialFile) -> None:
        threads.append(threading.get_ident())
        discard(partial)

    monkeypatch.setattr(PartialFile, "discard", noted)
    assert code_of(await upload(client, form(purpose=b"other"))) == (400, "unsupported_value")
    assert threads
    assert threading.get_ident() not in threads
    assert kept(tmp_path / "files") == []


async def test_nothing_is_read_after_the_end_of_a_form(client: httpx2.AsyncClient) -> None:
    num_read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_read
        yield form()
        while num_read < 1000:
            num_read += 1
            yield b"z" * 1000

    assert (await client.post("/v1/files", content=endless(), headers=FORM)).status_code == 200
    assert num_read < 10


async def test_a_form_without_end_is_refused(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    num_read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_read
        while num_read < 1000:
            num_read += 1
            yield b"\r\n" * 500

    answer = await client.post("/v1/files", content=endless(), headers=FORM)
    assert code_of(answer) == (413, "request_too_large")
    assert num_read < 200
    assert kept(tmp_path / "files") == []


async def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    now = [0.0]
    files = StoredFiles(tmp_path, lambda: now[0])
    whole = files.begin(ANYONE)
    whole.finish(filename="a", purpose="batch")
    half = files.begin(ANYONE)
    half.write(b"half")
    folder = files.folder(ANYONE)
    (folder / ("file-" + "1" * 32)).write_bytes(b"no sidecar")
    batch = files.batch_folder(ANYONE, "batch_" + "1" * 32)
    batch.mkdir()
    for path in folder.iterdir():
        os.utime(path, (100.0, 100.0))
    now[0] = 200.0
    assert files.sweep() == []
    assert len(kept(tmp_path)) == 5
    now[0] = 10_000.0
    assert files.sweep() == [batch]
    assert len(kept(tmp_path)) == 3


def test_the_sweep_keeps_foreign_files_and_skips_unreadable_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = StoredFiles(tmp_path, lambda: 10_000.0)
    owner = files.folder(ANYONE)
    others = [
        tmp_path / "home" / "thesis.tex",
        tmp_path / "home" / f"file-{'1' * 32}",
        owner / "notes.txt",
        owner / "old" / "a",
        owner / ".part-x",
        owner / f"batch_{'1' * 32}.bak" / "a",
    ]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / ("2" * 32)).symlink_to(tmp_path / "home")
    unreadable = tmp_path / ("0" * 32)
    unreadable.mkdir()
    swept = owner / f"file-{'3' * 32}"
    swept.write_bytes(b"")
    for path in tmp_path.rglob("*"):
        os.utime(path, (100.0, 100.0))
    scandir = os.scandir

    def refuse(path: Path) -> Any:
        if Path(path) == unreadable:
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert files.sweep() == []
    assert all(path.exists() for path in others)
    assert not swept.exists()


async def test_no_key_reaches_the_files_and_batches_of_another(redis_server: EmbeddedServer, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", "one", "two")
    async with running_app(redis_server.url, files=tmp_path / "files", keys=tmp_path / "keys") as (_, client):
        one, two = bearer(keys["one"]), bearer(keys["two"])
        file = (await upload(client, **one)).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=body, headers=one)).json()
        assert code_of(await client.post("/v1/batches", json=body, headers=two)) == (404, "not_found")
        for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content", f"/v1/batches/{batch['id']}"):
            assert (await client.get(path, headers=one)).status_code == 200
            assert code_of(await client.get(path, headers=two)) == (404, "not_found")
        assert (await client.delete(f"/v1/files/{file['id']}", headers=two)).status_code == 404
        cancel = f"/v1/batches/{batch['id']}/cancel"
        assert (await client.post(cancel, json={}, headers=two)).status_code == 404
        for path in ("/v1/files", "/v1/batches"):
            assert len((await client.get(path, headers=one)).json()["data"]) == 1
            assert (await client.get(path, headers=two)).json()["data"] == []
            assert (await client.get(path)).status_code == 401


async def test_without_a_directory_there_are_neither_files_nor_batches(redis_server: EmbeddedServer) -> None:
    async with running_app(redis_server.url) as (_, client):
        for path in ("/v1/files", "/v1/files/x", "/v1/files/x/content", "/v1/batches", "/v1/batches/x"):
            assert code_of(await client.get(path)) == (501, "no_files")
        assert code_of(await upload(client)) == (501, "no_files")


BATCH: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {str(each): "x" for each in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
    ],
)
async def test_a_wrong_field_of_a_batch_is_named(
    client: httpx2.AsyncClient, changes: dict[str, Any], param: str
) -> None:
    file = (await upload(client)).json()
    answer = await client.post("/v1/batches", json={**BATCH, "input_file_id": file["id"], **changes})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_batch_of_a_missing_file_is_not_found(client: httpx2.AsyncClient) -> None:
    answer = await client.post("/v1/batches", json={**BATCH, "input_file_id": "file-" + "0" * 32})
    assert code_of(answer) == (404, "not_found")


async def test_a_batch_whose_input_cannot_be_copied_to_a_full_disk_is_refused(
    client: httpx2.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError("no links here")

    file = (await upload(client, form(b"z" * 50_000))).json()
    monkeypatch.setattr(os, "link", no_links)
    with room_for(1000):
        answer = await client.post("/v1/batches", json={**BATCH, "input_file_id": file["id"]})
    assert code_of(answer) == (507, "storage_full")
    assert len(kept(tmp_path / "files")) == 2


async def test_batches_are_listed_page_by_page_the_newest_first(client: httpx2.AsyncClient) -> None:
    file = (await upload(client)).json()
    made = []
    for _ in range(3):
        made.append((await client.post("/v1/batches", json={**BATCH, "input_file_id": file["id"]})).json()["id"])
        await asyncio.sleep(0.002)  # two of one millisecond have no order
    first = (await client.get("/v1/batches", params={"limit": "2"})).json()
    assert [batch["id"] for batch in first["data"]] == made[:0:-1]
    assert first["has_more"]
    rest = (await client.get("/v1/batches", params={"after": first["last_id"]})).json()
    assert ([batch["id"] for batch in rest["data"]], rest["has_more"]) == (made[:1], False)
    assert json.dumps(rest).count("secret") == 0
