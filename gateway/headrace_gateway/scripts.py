"""Loads the gateway's Lua scripts from the folder beside this module. Each name is a file.

`headrace_broker.scripts` says how a script names its keys and arguments.
"""

from headrace_broker.scripts import LuaScript, load
from headrace_gateway.redis_keys import KEYS


def script(*names: str) -> LuaScript:
    """Return the script `lua/<name>.lua` of this package; name preludes first."""
    return load("headrace_gateway", KEYS, *names)
