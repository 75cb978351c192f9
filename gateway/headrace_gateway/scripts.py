"""Loads the gateway's Lua scripts from the folder beside this module. Each name is a file."""

from functools import cache
from importlib.resources import files


@cache
def lua(*names: str) -> str:
    """Return the text of each `lua/<name>.lua`, joined; name preludes first."""
    folder = files("headrace_gateway") / "lua"
    return "\n".join((folder / f"{name}.lua").read_text() for name in names)
