"""The number of the wire format. docs/wire.md says what it promises."""

from typing import Final

from headrace_wire.values import is_integer, shown

WIRE_NUMBER: Final = 1
"""What this version writes. It grows when a reader that ignores unknown keys would no longer understand the rest."""
SERVED: Final = (WIRE_NUMBER,)
"""What this version reads: its own number and the one before it. There is none before 1."""


def wire_problem(value: object) -> str | None:
    """Return why this version cannot read a message or a stream whose `wire` has this value; None if it can.

    Those of versions that do not write it have the number 1.
    """
    if value is None or (is_integer(value) and value in SERVED):
        return None
    if not is_integer(value) or value < 1:
        return f"wire must be the number of a wire format, an integer from 1, got {shown(value)}"
    served = " and ".join(map(str, SERVED))
    side = "the reader" if value > WIRE_NUMBER else "the writer"
    return f"it was written in wire format {shown(value)}, and this version of Headrace reads {served}: upgrade {side}"
