"""The message header `due`: the time at which a request should have ended."""

from typing import Final

from headrace_wire.values import is_number, shown

LATEST_DUE: Final = 2**33
"""Unix seconds, in the year 2242; `lua/tenant_prelude.lua` has the same limit."""


def due_problem(value: object) -> str | None:
    """Return what is wrong with the header's value; None if it is valid or absent."""
    if value is None or (is_number(value) and 0 <= value <= LATEST_DUE):
        return None
    return f"due must be a number of unix seconds from 0 to {LATEST_DUE}, got {shown(value)}"
