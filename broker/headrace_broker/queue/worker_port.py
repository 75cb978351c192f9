"""`WorkerPort`: the worker's methods that the lease transport calls. `DeliveryInfo`: its facts about a message."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Protocol

from headrace_broker.queue.dead_letters import DeadLetter
from headrace_broker.streams.grant import Grant

DELIVERY: Final = "headrace_delivery"
"""In a message's delivery_info: its `DeliveryInfo`."""


@dataclass(frozen=True, slots=True)
class DeliveryInfo:
    """What the queue knows of a delivered message."""

    content: str = ""
    """The `message_envelope.content_digest`."""
    queued_at: float | None = None
    """When it began to wait by Redis's clock, converted to this process's monotonic clock; None if unknown."""
    step: int = 0
    """Priority step of the list in which it arrived, or to which it moved up because of its due time."""
    over_quota: int = 0
    """The tenant's quota, if the message exceeds it and has to be refused; else 0."""
    preemptions: int = 0
    """How often it was requeued to make room for a message of a higher priority."""
    choices: int = 1
    """Number of choices, from its header or from a worker that has decoded it; 1 if unknown."""
    grant: Grant | None = None
    """The lease of this delivery; None if the message has no record."""
    home: str = ""
    """Name of the stream server of its request; '' if the stream is on the main server."""
    lost: str = ""
    """Name of the stream server that has lost the begun stream of its request; '' if it is not lost."""


class WorkerPort(Protocol):
    """Passed to `transport.Channel.serve`. The methods about slots are called many times a second."""

    preemption_wait_seconds: float
    """Time from the arrival of a message that would preempt running requests to its fetch, if it still waits then."""

    def free_slots(self) -> int:
        """Return how many choices, in all, the messages fetched now may have: the engine's free capacity."""

    def split_below(self) -> int:
        """Return a priority step. Only messages of higher priority may have more choices than there are free slots."""

    def preemptible_slots(self) -> tuple[int, int]:
        """Return the lowest priority that can be preempted, as a step, and how many choices may preempt it.

        That is the total for all messages of a higher priority. Called when no slot is free.
        """

    def token_seconds(self) -> float | None:
        """Return the time in which one request gets one token while the worker is busy; None if it is not measured."""

    def away_homes(self) -> Collection[str]:
        """Return the stream servers that the worker cannot write to. Their messages stay in the queue."""

    def lease_lost(self, message: Any) -> None:
        """Take note that another worker may have this message."""

    def dead_lettered(self, letter: DeadLetter) -> None:
        """Take note of a message that this process has made a dead letter."""

    def refused(self, reason: str) -> None:
        """Take note that messages cannot be taken or requeued."""
