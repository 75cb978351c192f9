"""Every script that writes twice checks its rights before, so that a refused command leaves nothing half done."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import headrace_broker
import headrace_gateway
from headrace_broker.scripts import LuaScript
from headrace_broker.server.rights import needed_commands
from headrace_broker.server.users import USERS

READS = {
    *("EXISTS", "GET", "TIME", "TTL", "TYPE", "LINDEX", "LLEN", "LRANGE", "XRANGE", "XREVRANGE"),
    *("HEXISTS", "HGET", "HGETALL", "HLEN", "HMGET", "HRANDFIELD"),
    *("ZCARD", "ZCOUNT", "ZRANGE", "ZRANGEBYSCORE", "ZREVRANGE", "ZSCORE"),
}
UNCHECKED = {
    "_PUBLISH": "a repeated call writes what is missing",
    "END_STREAM": "a repeated call writes what is missing, and a producer may not run the commands for workers",
}


def scripts() -> dict[str, LuaScript]:
    """Return the scripts of the broker and the gateway by the names of their constants."""
    found = {}
    for package in (headrace_broker, headrace_gateway):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not info.name.endswith("__main__"):
                for name, each in scripts_of(importlib.import_module(info.name)):
                    found[name if name in UNCHECKED else f"{info.name}.{name}"] = each
    return found


def scripts_of(module: ModuleType) -> Iterator[tuple[str, LuaScript]]:
    for name, value in vars(module).items():
        for key, each in (value if isinstance(value, dict) and name == "SCRIPTS" else {"": value}).items():
            if isinstance(each, LuaScript):
                yield name + key, each


SCRIPTS = scripts()


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - UNCHECKED))
def test_a_script_with_several_writes_checks_its_rights_first(name: str) -> None:
    text = SCRIPTS[name].text
    writes = [command for command in re.findall(r"redis\.p?call\('(\w+)'", text) if command not in READS]
    assert len(writes) < 2 or "redis.acl_check_cmd" in text


@pytest.mark.parametrize("package", [headrace_broker, headrace_gateway], ids=lambda package: package.__name__)
def test_every_script_is_loaded(package: ModuleType) -> None:
    texts = "\n".join(script.text for script in SCRIPTS.values())
    files = [path for folder in package.__path__ for path in Path(folder).rglob("*.lua")]
    assert files
    # unused functions are left out of a script, so a file is known by the comment with which it begins
    assert [path.name for path in files if path.read_text(encoding="utf-8").partition("\n")[0] not in texts] == []


def test_doctor_checks_the_right_of_a_worker_to_every_command_of_the_broker_s_scripts() -> None:
    texts = [script.text for name, script in SCRIPTS.items() if not name.startswith("headrace_gateway")]
    called = {command for text in texts for command in re.findall(r"redis\.p?call\('(\w+)'", text)}
    checked = {command[0] for user in USERS if user.name == "worker" for command in needed_commands(user)}
    assert called - checked == {"TIME"}  # which takes no key
