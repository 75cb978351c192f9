"""Loads the gateway's Lua scripts, which lie beside this module; `headrace_broker.scripts` says how they name keys."""

from headrace_broker.scripts import LuaScript, load
from headrace_gateway.redis_keys import KEYS


def script(*names: str) -> LuaScript:
    """The script `lua/<name>.lua` of this package, preludes first."""
    return load("headrace_gateway", KEYS, *names)
