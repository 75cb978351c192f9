"""`LeasedMessage`: a fetched message, as the lease scripts return it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_broker.keys import step_of
from headrace_broker.streams.grant import Grant


@dataclass(frozen=True, slots=True)
class LeasedMessage:
    """A fetched message, byte for byte, with its lease."""

    lease_id: str
    list_name: str
    body: bytes = field(repr=False)
    deliveries: int  # 1 the first time
    over_quota: int = 0
    """The tenant's quota, if this message exceeds it and has to be refused; else 0."""
    bound_id: str | None = None
    """The request id that is bound to it; None if the scripts could not read one."""
    waited: float | None = field(default=None, compare=False)
    """Seconds by Redis's clock since the message was first sorted, or since it became due if it was postponed; None
    if a worker of an earlier version sorted it."""
    step: int = 0
    """Priority step at which it was taken: that of its list, or a lower one (0 is served first) if it had aged."""
    preemptions: int = 0
    """How often it was returned to the queue to make room for a message of a higher priority."""
    choices: int = 1
    """Number of choices, from its header or from a worker that has decoded it."""
    grant: Grant | None = field(default=None, compare=False)
    """The lease's number among all leases of the message; None if the message has no record."""
    home: str = ""
    """Name of the stream server of its request; '' if the stream is on the main server."""
    lost: str = ""
    """Name of the stream server that has lost the begun stream of its request; '' if it is not lost."""


def id_of(bound_id: bytes) -> str | None:
    """Return the bound request id of a script's reply; None if there is none."""
    return bound_id.decode(errors="replace") or None


def leased_message(fields: Sequence[Any], owner: str) -> LeasedMessage:
    """Return the message of a script's reply. `owner` has the lease."""
    lease_id, name, body, deliveries, quota, bound_id, waited, taken_from, preemptions, choices, number, home, lost = (
        fields
    )
    since = int(waited) / 1e6 if waited else None
    step = step_of(taken_from.decode())
    lease_id, name, bound_id = lease_id.decode(), name.decode(), id_of(bound_id)
    grant = Grant.of(number, owner, lease_id)
    facts = (lease_id, name, body, deliveries, quota, bound_id, since, step, preemptions, choices)
    return LeasedMessage(*facts, grant=grant, home=home.decode(), lost=lost.decode())
