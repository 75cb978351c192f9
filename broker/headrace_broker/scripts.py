"""Loads Lua scripts. A script is sent with its preludes, and with a generated one that defines its keys and arguments.

A script declares its keys and arguments in lines at its top:

    -- KEYS: STREAM, ENDED
    -- ARGV: data, seconds, ids[]

Names of KEYS are those of the package's `KeySchema`, KEY for any key, or QUEUE for the name of a queue, which is also
the key of its first list. A name with `[]` is an array. If there are several arrays, their elements alternate. The
declarations of preludes come first. The generated prelude also defines `<name>_key(...)`, fixed keys and words of the
schema. In a script with QUEUE, a key whose only part is the queue has its name in capitals: `LEASES` is
`leases_key(QUEUE)`. A name that is not declared, or declared twice, is an error.

A line `-- RIGHTS: STREAM` adds a check before the first write. It refuses the call unless the user may run every
command of the script and of its preludes on that key, and may read and write every key of the schema that they use.
Without the check, Redis would keep the writes before a command that it refuses.

A function of a prelude that the script does not use is left out: every call would create it again, and `RIGHTS` would
ask for its commands.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import redis

from headrace_broker.key_schema import KeySchema, RedisType, lua_text
from headrace_broker.keys import KEYS

_HEADER: Final = re.compile(r"^-- (KEYS|ARGV): (.*)$", re.MULTILINE)
_NAME: Final = {"KEYS": re.compile(r"[A-Z_]+(\[\])?"), "ARGV": re.compile(r"[a-z_]+(\[\])?")}
_RIGHTS: Final = re.compile(r"^-- RIGHTS: ([A-Z_]+)$", re.MULTILINE)
_COMMENT: Final = re.compile(r"--.*")
_INNER: Final = r"(?:(?: .*|--.*)?\n)*"
_BEGINNING: Final = re.compile(r"^local function ", re.MULTILINE)
_FUNCTION: Final = re.compile(
    rf"^local function (\w+)\(.*\)(?: .*\bend\n(?! )|(?: --.*)?\n{_INNER}end\n)", re.MULTILINE
)
"""A function that is not inside a block."""
_BLOCK: Final = re.compile(rf"^((?:local [\w, ]+\n(?:--.*\n)*)+)do\b.*\n{_INNER}end\n", re.MULTILINE)
"""A block that defines the names that are declared before it."""
_NAME_OF_CODE: Final = re.compile(r"(?<!\w\.)\b[a-zA-Z_]\w*")
_COMMAND: Final = re.compile(r"redis\.p?call\('([A-Z]+)'")
_WRITE: Final[dict[RedisType, str]] = {
    "string": "SET",
    "list": "LPUSH",
    "set": "SADD",
    "zset": "ZADD",
    "hash": "HSET",
    "stream": "XADD",
}
_ANY: Final = "key"
_QUEUE: Final = "queue"


@dataclass(frozen=True, slots=True)
class LuaScript:
    """A script as it is sent to Redis."""

    text: str
    names: tuple[str, ...]
    """Names of its single KEYS, in their order."""
    repeated: tuple[str, ...]
    """Names of its arrays of KEYS, which come after the single ones."""

    def keys(self, **given: str | Sequence[str]) -> list[str]:
        """Return the KEYS of a call from keys by name. Raises TypeError for a missing or an unknown name."""
        if given.keys() != {*self.names, *self.repeated}:
            raise TypeError(f"the script's keys are {', '.join((*self.names, *self.repeated))}, not {', '.join(given)}")
        keys = [str(given[name]) for name in self.names]
        for row in zip(*(given[name] for name in self.repeated), strict=True):
            keys += row
        return keys

    def bound(self, client: Any) -> Callable[..., Any]:
        """Return a function that runs the script by a client, with the values of ARGV and the KEYS by their names."""
        run = client.register_script(self.text)
        return lambda *args, **keys: run(keys=self.keys(**keys), args=args)

    def read(self, client: "redis.Redis", *args: str, **keys: str | Sequence[str]) -> Any:
        """Run a script that writes nothing. Its whole text is sent, because a read-only user may not load scripts."""
        found = self.keys(**keys)
        return client.eval_ro(self.text, len(found), *found, *args)


def script(*names: str) -> LuaScript:
    """Load the scripts `lua/<name>.lua` of this package as one. Give the preludes first."""
    return load("headrace_broker", KEYS, *names)


@cache
def load(package: str, schema: KeySchema, *names: str) -> LuaScript:
    """Load a script of a package that declares its keys in `schema`. Raises ValueError if a name is wrong."""
    folder = files(package) / "lua"
    body = "\n".join((folder / f"{name}.lua").read_text(encoding="utf-8") for name in names)
    return compose(names[-1], body, schema)


def compose(name: str, body: str, schema: KeySchema) -> LuaScript:
    """Make a script from its text. Raises ValueError if it uses an undeclared name, or declares one twice."""
    declaring, body = body, without_unused(name, body)
    code = _COMMENT.sub("", body)
    used = set(re.findall(r"\w+", code))
    declared = {kind: _declared(name, kind, declaring) for kind in ("KEYS", "ARGV")}
    keys = [each.removesuffix("[]").lower() for each in declared["KEYS"]]
    built = [key.name for key in schema if key.parts]
    of_queue = {
        key.name.upper(): key
        for key in schema
        if _QUEUE in keys and key.parts == (_QUEUE,) and key.name.upper() in used and key.name not in keys
    }
    problems = [
        *(f"uses {each} by position" for each in ("KEYS", "ARGV") if each in used),
        *(f"unknown key {each.upper()}" for each in keys if each not in (*built, _ANY, _QUEUE)),
        *(
            f"undeclared {each.upper()}"
            for each in built
            if each.upper() in used and each not in keys and each.upper() not in of_queue
        ),
    ]
    if problems:
        raise ValueError(f"script {name}: {', '.join(problems)}")
    lines = [line for kind, given in declared.items() for line in _named(kind, given)]
    lines += [key.lua() for key in schema if key.lua_name in used]
    lines += [f"local {capital} = {key.lua_of(_QUEUE.upper())}" for capital, key in of_queue.items()]
    lines += [f"local {word} = {lua_text(text)}" for word, text in schema.words.items() if word in used]
    for key in _RIGHTS.findall(body)[:1]:
        pairs = [f"{lua_text(command)}, {key}" for command in sorted({*_COMMAND.findall(code)})]
        pairs += [f"{lua_text(_WRITE[each.type])}, {each.sample()}" for each in schema if each.lua_name in used]
        pairs += [f"{lua_text(_WRITE[each.type])}, {capital}" for capital, each in of_queue.items()]
        lines.append(_check_of_rights(pairs))
    repeated = tuple(each for each, written in zip(keys, declared["KEYS"], strict=True) if written.endswith("[]"))
    return LuaScript("\n".join((*lines, body)), tuple(each for each in keys if each not in repeated), repeated)


def without_unused(name: str, body: str) -> str:
    """Leave out the functions that nothing calls, and those that only such functions call.

    Raises ValueError if the text of a function outside of blocks is not clear: its lines begin with spaces, and a line
    `end` follows. A comment begins with the first `--` of a line.
    """
    unclear = [line for line in body.splitlines() if "--[[" in line or line.partition("--")[0].count("'") % 2]
    if unclear or len(_BEGINNING.findall(body)) != len(_FUNCTION.findall(body)):
        lines = "; ".join(unclear) or "a function without a line `end`, or whose lines do not begin with spaces"
        raise ValueError(f"script {name}: {lines}")
    blocks = [found for pattern in (_FUNCTION, _BLOCK) for found in pattern.finditer(body)]
    unused = [(_names_in(found[1]) - {"local"}, found[0]) for found in blocks]
    rest = body
    for _, text in unused:
        rest = rest.replace(text, "", 1)
    names = _names_in(rest)
    while called := [part for part in unused if part[0] & names]:
        unused = [part for part in unused if part not in called]
        names = names.union(*(_names_in(text) for _, text in called))
    for _, text in unused:
        body = body.replace(text, "", 1)
    return body


def _names_in(code: str) -> set[str]:
    """Return the words of Lua code, without the names of fields."""
    return set(_NAME_OF_CODE.findall(_COMMENT.sub("", code)))


def _check_of_rights(pairs: Sequence[str]) -> str:
    """Return Lua that ends the script if the user may not run a command on its key, or if the command was renamed.

    A check takes Redis a quarter of a microsecond.
    """
    return f"""do
  local rights = {{{", ".join(pairs)}}}
  for i = 1, #rights, 2 do
    local is_known, may_run = pcall(redis.acl_check_cmd, rights[i], rights[i + 1])
    if not (is_known and may_run) then
      return {{err = 'NOPERM this user may not run ' .. rights[i] .. ' on the key ' .. rights[i + 1] .. ': permit it'}}
    end
  end
end"""


def _declared(name: str, kind: str, body: str) -> list[str]:
    names = [each for found, line in _HEADER.findall(body) if found == kind for each in line.split(", ")]
    wrong = [each for each in names if not _NAME[kind].fullmatch(each)]
    bare = [each.removesuffix("[]") for each in names]
    repeated = [each.endswith("[]") for each in names]
    if wrong or len({*bare}) < len(bare) or repeated != sorted(repeated):
        raise ValueError(f"script {name}: {kind} must be distinct names, arrays last, got {', '.join(names)}")
    return names


def _named(kind: str, names: Sequence[str]) -> list[str]:
    """Return lines of Lua that assign KEYS or ARGV to these names."""
    once = [each for each in names if not each.endswith("[]")]
    again = [each.removesuffix("[]") for each in names if each.endswith("[]")]
    lines = []
    if once:
        values = ", ".join(f"{kind}[{place}]" for place in range(1, len(once) + 1))
        lines.append(f"local {', '.join(once)} = {values}")
    if again:
        places = ", ".join(f"{each}[#{each} + 1]" for each in again)
        values = ", ".join(f"{kind}[i + {offset}]" if offset else f"{kind}[i]" for offset in range(len(again)))
        lines.append(f"local {', '.join(again)} = {', '.join('{}' for _ in again)}")
        lines.append(f"for i = {len(once) + 1}, #{kind}, {len(again)} do {places} = {values} end")
    return lines
