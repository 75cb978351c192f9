"""The users of Redis are what the declared keys and rights say."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headrace_broker.server.users import WRITE

_PATH = Path(__file__).parents[2] / "deploy" / "redis" / "generate.py"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_redis_users", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


def test_the_acl_file_and_the_compose_file_are_those_of_the_declarations(generate: ModuleType) -> None:
    assert generate.stale() == [], f"write them again: {generate.COMMAND}"


def test_a_changed_file_is_stale(generate: ModuleType, tmp_path: Path) -> None:
    acl, compose = (tmp_path / path.name for path in generate.FILES)
    for source, copy in zip(generate.FILES, (acl, compose), strict=True):
        copy.write_text(source.read_text().replace("+lrem", "+lpop"))
    assert generate.stale((acl, compose)) == ["users.acl", "docker-compose.yml"]


def test_the_users_that_may_write_a_key_are_its_declared_writers(generate: ModuleType) -> None:
    assert list(generate.wrong_writers()) == []


def test_a_declared_writer_without_the_right_is_found(generate: ModuleType) -> None:
    users = tuple(
        dataclasses.replace(user, rights=tuple(each for each in user.rights if each.names != "dead_letters"))
        for user in generate.USERS
    )
    assert list(generate.wrong_writers(users)) == [
        "key dead_letters: its declared writers are gateway, but no others may write it"
    ]


def test_a_right_to_write_that_is_not_declared_is_found(generate: ModuleType) -> None:
    users = (*generate.USERS, generate.User("exporter", "", (generate.Rights(WRITE, "models", "hset"),)))
    assert list(generate.wrong_writers(users)) == [
        "key models: its declared writers are workers alone, but exporter may write it"
    ]
