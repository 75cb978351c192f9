"""`MessageEnding`: what else the script does that ends a message."""

from dataclasses import dataclass, field

from headrace_broker.queue.final_writes import FinalWrites


@dataclass(slots=True)
class MessageEnding:
    """Set before the message ends, by parts."""

    tokens: int | str = ""
    """What the message cost; '' if unknown."""
    entry: bytes = b""
    """What the usage ledger counts, packed; empty for nothing."""
    writes: FinalWrites = field(default_factory=FinalWrites)
