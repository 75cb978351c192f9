"""`KeySchema`: declares a package's Redis keys, once for Python, Lua and the reference pages.

Each key has a name, a pattern, a type, writers and a lifetime. Python builds it with the declared function or constant.
A Lua script has the same functions and constants, from a prelude that `scripts.py` generates: `stream_key(request_id)`
is the same key in both languages, and `MODELS` is the fixed key of that name.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar

RedisType: TypeAlias = Literal["string", "list", "set", "zset", "hash", "stream"]
Writer: TypeAlias = Literal["producer", "subscriber", "gateway", "worker", "operator"]
"""Users of deploy/redis/users.acl. A writer may also delete a key and change its time to live."""

_Build = TypeVar("_Build", bound=Callable[..., str])


@dataclass(frozen=True, slots=True)
class RedisKey:
    """The declaration of all keys of one pattern."""

    name: str
    """In Lua, `<name>_key(...)` builds a key; the name in capitals is a fixed key or one of KEYS."""
    pattern: str
    """The key, with `<part>` for each of its parts."""
    parts: tuple[str, ...]
    type: RedisType
    writers: tuple[Writer, ...]
    life: str
    holds: str

    @property
    def lua_name(self) -> str:
        return f"{self.name}_key" if self.parts else self.name.upper()

    def sample(self) -> str:
        """Return a Lua expression for a key of this pattern: the fixed key, or a key of empty parts."""
        empty = ", ".join(["''"] * len(self.parts))
        return f"{self.lua_name}({empty})" if self.parts else self.lua_name

    def lua(self) -> str:
        """Return the line of Lua that defines the fixed key, or the function that builds one."""
        if not self.parts:
            return f"local {self.lua_name} = {lua_text(self.pattern)}"
        return f"local function {self.lua_name}({', '.join(self.parts)}) return {self.lua_of(*self.parts)} end"

    def lua_of(self, *values: str) -> str:
        """Return the Lua expression of the key whose parts are these Lua expressions."""
        pieces, rest = [], self.pattern
        for part, value in zip(self.parts, values, strict=True):
            before, _, rest = rest.partition(f"<{part}>")
            pieces += [lua_text(before), value] if before else [value]
        pieces += [lua_text(rest)] if rest else []
        return " .. ".join(pieces)


class KeySchema:
    """The keys of one package.

    Args:
        words: other strings that Python and Lua share, by their names in Lua.
    """

    def __init__(self, words: Mapping[str, str] | None = None) -> None:
        self._keys: Final[dict[str, RedisKey]] = {}
        self.words: Final = dict(words or {})

    def __iter__(self) -> Iterator[RedisKey]:
        return iter(self._keys.values())

    def __getitem__(self, name: str) -> RedisKey:
        return self._keys[name]

    def of(self, build: Callable[..., str]) -> RedisKey:
        """Return the declaration of the keys that this function builds."""
        return self[build.__name__.removesuffix("_key")]

    def fixed(self, name: str, key: str, kind: RedisType, writers: tuple[Writer, ...], life: str, holds: str) -> str:
        """Declare a key without parts, and return it."""
        self.add(RedisKey(name, key, (), kind, writers, life, holds))
        return key

    def built(
        self, kind: RedisType, writers: tuple[Writer, ...], life: str, *, name: str = ""
    ) -> Callable[[_Build], _Build]:
        """Declare the keys that the decorated function builds from its arguments. The function is not changed.

        The first paragraph of its docstring says what the keys hold. `name` is the function's name without `_key`,
        unless it is given. Raises ValueError unless the key contains all arguments in their order.
        """

        def declare(build: _Build) -> _Build:
            parts = tuple(inspect.signature(build).parameters)
            pattern = build(*(f"_{part}_" for part in parts))
            for part in parts:
                pattern = pattern.replace(f"_{part}_", f"<{part}>")
            places = [pattern.find(f"<{part}>") for part in parts]
            if -1 in places or places != sorted(places):
                raise ValueError(f"{build.__name__}: the key must contain all arguments in their order, got {pattern}")
            holds = inspect.cleandoc(build.__doc__ or "").partition("\n\n")[0]
            self.add(RedisKey(name or build.__name__.removesuffix("_key"), pattern, parts, kind, writers, life, holds))
            return build

        return declare

    def add(self, key: RedisKey) -> None:
        """Declare a key. Raises ValueError if another one has its name or its pattern."""
        if key.name in self._keys:
            raise ValueError(f"two keys have the name {key.name}")
        if key.pattern in {each.pattern for each in self}:
            raise ValueError(f"two keys have the pattern {key.pattern!r}")
        self._keys[key.name] = key


def lua_text(text: str) -> str:
    """Return a Lua string literal, with control characters as `\\006`."""
    shown = "".join(char if char.isprintable() and char not in "'\\" else f"\\{ord(char):03d}" for char in text)
    return f"'{shown}'"


def span(seconds: int) -> str:
    """Format a duration for the reference pages, such as `2 hours`."""
    for unit, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds % size == 0:
            return f"{seconds // size} {unit}{'s' * (seconds > size)}"
    return f"{seconds} s"
