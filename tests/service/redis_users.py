"""The Redis users of deploy/redis/users.acl, on a real server with the options of docker-compose.yml."""

import re
from pathlib import Path
from typing import Any

import yaml

from headrace_broker.server.embedded import EmbeddedServer
from service.servers import PROGRAM, SyncedServer

ROOT = Path(__file__).resolve().parents[2]


def users() -> dict[str, list[str]]:
    """Their rules by name, with the password `secret`."""
    lines = (ROOT / "deploy" / "redis" / "users.acl").read_text(encoding="utf-8").splitlines()
    rules = [re.sub(r"\$\{[^}]*\}", "secret", line).split() for line in lines]
    return {words[1]: words[2:] for words in rules}


def shipped_options(acl: Path) -> list[str]:
    """Get the arguments of the compose file's server, with its defaults and this ACL file."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    _shell, _flag, _script, _name, *words = services["redis"]["command"]
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words]
    return [str(acl) if word.endswith("users.acl") else word for word in words]


class ServerWithUsers(SyncedServer):
    """A server as the compose file starts it: with the users, and with its append-only file. `url` is admin's.

    Args:
        folder: for the ACL file.
        default: rules of the default user, where not the shipped ones.
    """

    def __init__(self, folder: Path, *, program: str = PROGRAM, default: str | None = None, **options: Any) -> None:
        acl = folder / "users.acl"
        rules = {name: " ".join(words) for name, words in users().items()}
        if default is not None:
            rules["default"] = default
        acl.write_text("".join(f"user {name} {words}\n" for name, words in rules.items()), encoding="utf-8")
        super().__init__(program=program, environ={}, password=False, arguments=shipped_options(acl), **options)

    def _url_at(self, port: int) -> str:
        return url_at(port, "admin")


def url_at(port: int, user: str) -> str:
    """The URL of a server or proxy on loopback for one of the users."""
    return f"redis://{user}:secret@127.0.0.1:{port}/0"


def url_of(server: EmbeddedServer, user: str) -> str:
    """The server's URL for one of its users."""
    return url_at(server.port, user)
