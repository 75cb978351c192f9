"""Loads the Lua scripts that lie beside this module. Each name is a file; preludes are put in front of it."""

from functools import cache
from importlib.resources import files


@cache
def lua(name: str, *, prelude: str | tuple[str, ...] | None) -> str:
    """The text of `lua/<name>.lua`, behind that of `lua/<prelude>.lua` of each prelude that is named."""
    folder = files("headrace_broker") / "lua"
    preludes = (prelude,) if isinstance(prelude, str) else prelude or ()
    return "\n".join((folder / f"{part}.lua").read_text() for part in (*preludes, name))
