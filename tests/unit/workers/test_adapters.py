"""The adapters that a worker serves: only those that the operator configures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace_workers.engine_link.adapters import Adapters
from headrace_workers.errors import WorkerSettingsError
from headrace_workers.settings import WorkerSettings
from unit.workers.desk import Desk
from unit.workers.fakes import FakeCeleryRequest


def make(folder: Path, content: str = "{}") -> str:
    """Make a folder that looks like an adapter; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(content)
    return str(folder)


def test_adapters_are_found_by_name_and_in_the_folder(tmp_path: Path) -> None:
    named = make(tmp_path / "somewhere" / "v3")
    make(tmp_path / "all" / "chat")
    adapters = Adapters({"sql": named}, str(tmp_path / "all"))
    sql, chat = adapters.find("sql"), adapters.find("chat")
    assert sql is not None and (sql.lora_name, sql.lora_path) == ("sql", named)
    assert chat is not None and chat.lora_path == str(tmp_path / "all" / "chat")
    assert adapters.find("other") is None
    assert adapters.find("v3") is None
    assert adapters.names == ("sql",)
    assert adapters.named() == [sql]


@pytest.mark.parametrize("name", ["..", "../secret", "/etc", ".", "", "all/../../secret", "a\0b", ".hidden"])
def test_a_name_cannot_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    make(tmp_path / "secret")
    make(tmp_path / "all" / ".hidden")
    (tmp_path / "all" / "adapter_config.json").write_text("{}")
    assert Adapters({}, str(tmp_path / "all")).find(name) is None


def test_an_adapter_with_replaced_files_has_another_id(tmp_path: Path) -> None:
    adapters = Adapters({"sql": make(tmp_path / "sql")})
    first, again = adapters.find("sql"), adapters.find("sql")
    assert first == again
    os.utime(tmp_path / "sql" / "adapter_config.json", ns=(1, 1))
    changed = adapters.find("sql")
    assert first is not None and changed is not None
    assert first.lora_int_id != changed.lora_int_id


def test_adapters_can_be_added_and_removed_while_the_worker_runs(tmp_path: Path) -> None:
    adapters = Adapters({}, str(tmp_path))
    assert adapters.enabled
    assert adapters.find("late") is None
    make(tmp_path / "late")
    assert adapters.find("late") is not None
    (tmp_path / "late" / "adapter_config.json").unlink()
    assert adapters.find("late") is None


def test_lora_is_off_without_adapters() -> None:
    assert not Adapters({}).enabled
    assert WorkerSettings(model="/m").engine_config().lora is None


def test_settings_configure_adapters_and_their_limits(tmp_path: Path) -> None:
    one, two = make(tmp_path / "1"), make(tmp_path / "2")
    settings = WorkerSettings(model="/m", lora_modules=f"one={one}, two={two}", max_loras=1, max_lora_rank=64)
    lora = settings.engine_config().lora
    assert lora is not None
    assert [request.lora_path for request in lora.preload] == [one, two]
    assert (lora.max_loras, lora.max_lora_rank, lora.max_cpu_loras) == (1, 64, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_modules": "sql"}, "name=folder pairs"),
        ({"lora_modules": "a=/x,a=/y"}, "each name once"),
        ({"lora_modules": "../x=/tmp"}, "lora must be 1 to 128"),
        ({"lora_modules": "sql=/does/not/exist"}, "the folder of 'sql', /does/not/exist, does not exist"),
        ({"lora_dir": "/does/not/exist"}, "HEADRACE_LORA_DIR: the folder /does/not/exist does not exist"),
    ],
)
def test_invalid_settings_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkerSettingsError, match=words):
        WorkerSettings(model="/m", **settings).engine_config()


def test_a_message_gets_the_adapter_that_it_names_or_is_refused(tmp_path: Path) -> None:
    adapters = Adapters({"sql": make(tmp_path / "sql")})
    desk = Desk(adapters=adapters)
    desk.accept(FakeCeleryRequest("r1", {"prompt": "abc", "lora": "sql", "sampling_params": {"n": 2}}))
    desk.wait_soon()
    assert [choice.lora_request for choice in desk.engine.sent] == [adapters.find("sql")] * 2
    desk.accept(FakeCeleryRequest("r2", {"prompt": "abc", "lora": None}))
    assert desk.engine.sent[-1].lora_request is None
    desk.accept(FakeCeleryRequest("r3", {"prompt": "abc", "lora": "other"}))
    desk.wait_soon()
    desk.settle()
    assert desk.results["r3"]["error"] == {
        "code": "invalid_request",
        "message": "tiny has no LoRA adapter named 'other'",
    }
