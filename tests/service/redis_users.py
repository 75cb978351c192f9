"""The Redis users of docker-compose.yml, on a real server."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from headrace_broker.connections import connect
from headrace_broker.embedded import EmbeddedServer
from service.servers import make_server

COMPOSE = Path(__file__).resolve().parents[2] / "docker-compose.yml"


def users() -> dict[str, list[str]]:
    """Their rules by name, with the password `secret`."""
    lines = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["configs"]["redis-users"]["content"].splitlines()
    rules = [re.sub(r"\$\{[^}]*\}", "secret", line).split() for line in lines]
    return {words[1]: words[2:] for words in rules}


@contextmanager
def make_server_with_users(folder: Path, **options: Any) -> Iterator[EmbeddedServer]:
    """Start a server with the file, as the container is: a rule that a server does not know would stop its start."""
    acl = folder / "users.acl"
    named = {name: rules for name, rules in users().items() if name != "default"}
    acl.write_text("".join(f"user {name} {' '.join(rules)}\n" for name, rules in named.items()), encoding="utf-8")
    with make_server(arguments=["--aclfile", str(acl)], **options) as running:
        with connect(running.url) as first:  # the one user that the server needs until it has been asked how it is
            first.execute_command("ACL", "SETUSER", "default", *users()["default"])
        yield running


def url_of(server: EmbeddedServer, user: str) -> str:
    """The server's URL for one of its users."""
    return server.url.replace("redis://", f"redis://{user}:secret@")
