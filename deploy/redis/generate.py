"""Write the users of Redis from the declared keys: `python deploy/redis/generate.py [--check]`.

The names of keys come from the schemas of the broker and the gateway. `headrace_broker.server.users` declares the
rights of each user. The lines go to deploy/redis/users.acl and to docker-compose.yml. With --check nothing is written,
and the exit status is 1 if a file is stale. The users that may write a key must be exactly the key's declared writers.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from headrace_broker.key_schema import RedisKey
from headrace_broker.keys import KEYS
from headrace_broker.server.users import READ, USERS, Rights, User
from headrace_gateway.redis import keys as gateway_keys

ROOT: Final = Path(__file__).parents[2]
FILES: Final = (ROOT / "deploy" / "redis" / "users.acl", ROOT / "docker-compose.yml")
COMMAND: Final = "make reference"
SCHEMA: Final = {key.name: key for schema in (KEYS, gateway_keys.KEYS) for key in schema}

WRITING: Final = frozenset(
    "lpush rpush blpop lrem sadd hset xadd set del expire pexpire @string @hash @sortedset".split()  # noqa: SIM905
)
"""Those commands of users that change a key. EVAL is not among them: a script's commands need rights of their own."""


def line_of(user: User) -> str:
    """Return the user's line of an ACL file, with a variable for the password."""
    password = "off" if user.name == "default" else f"on >${{REDIS_{user.name.upper()}_PASSWORD}}"
    return " ".join(("user", user.name, password, user.rules, *map(str, user.rights)))


def may_write(rights: Rights, key: RedisKey) -> bool:
    if rights.access == READ or not WRITING & {*rights.commands.split()}:
        return False
    prefix = key.pattern.partition("<")[0]
    return any(
        prefix == pattern or (pattern.endswith("*") and prefix.startswith(pattern[:-1])) for pattern in rights.patterns
    )


def wrong_writers(users: tuple[User, ...] = USERS) -> Iterator[str]:
    """Yield a message for each key whose declared writers are not the users that may write it.

    Workers and operators may write all keys. `client` is a producer and a subscriber.
    """
    for key in SCHEMA.values():
        allowed = {user.name for user in users if any(may_write(rights, key) for rights in user.rights)} - {"client"}
        declared = {*key.writers} - {"worker", "operator"}
        if allowed != declared:
            yield (
                f"key {key.name}: its declared writers are {', '.join(sorted(declared)) or 'workers alone'}, "
                f"but {', '.join(sorted(allowed)) or 'no others'} may write it"
            )


def lines() -> list[str]:
    return [line_of(user) for user in USERS]


def text_of(path: Path) -> str:
    """Return what the file should contain."""
    if path.suffix == ".acl":
        return "\n".join(lines()) + "\n"
    found = [re.sub(r"(_PASSWORD)\}", r"\1:?run deploy/compose/make-env}", line) for line in lines()]
    block = "".join(f"  {line}\n" for line in found)
    written, count = re.subn(r"(?m)(?:^  user \S+ (?:on|off) .*\n)+", lambda _: block, path.read_text(encoding="utf-8"))
    assert count == 1, f"{path.name} must have one block of users, got {count}"
    return written


def stale(paths: tuple[Path, ...] = FILES) -> list[str]:
    """Return the names of the files that differ from the declarations."""
    return [path.name for path in paths if path.read_text(encoding="utf-8") != text_of(path)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file is stale")
    is_check = parser.parse_args().check
    wrong = list(wrong_writers())
    if is_check and stale():
        wrong.append(f"{', '.join(stale())} differ from the declared keys and rights; run `{COMMAND}`")
    sys.stderr.writelines(f"deploy/redis: {problem}\n" for problem in wrong)
    if not is_check and not wrong:
        for path in FILES:
            path.write_text(text_of(path), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
