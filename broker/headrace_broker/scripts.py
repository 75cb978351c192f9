"""Loads the Lua scripts that lie beside this module. Each name is a file; a prelude is put in front of it."""

from functools import cache
from importlib.resources import files


@cache
def lua(name: str, *, prelude: str | None) -> str:
    """The text of `lua/<name>.lua`, behind that of `lua/<prelude>.lua` where one is named."""
    folder = files("headrace_broker") / "lua"
    return "\n".join((folder / f"{part}.lua").read_text() for part in (prelude, name) if part)
