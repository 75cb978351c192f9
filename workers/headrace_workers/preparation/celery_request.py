"""`CeleryRequest`: the typed interface of a received message. `task.EngineRequest` implements it.

Celery is untyped, so its names are declared here. Each message is settled once, by one of the methods below.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from headrace_broker.queue.worker_port import DeliveryInfo
from headrace_broker.results import Usage
from headrace_broker.streams.grant import Grant
from headrace_wire.codes import DeadLetterReason


class CeleryRequest(Protocol):
    """Celery's own members come first. Those of `EngineRequest` follow, and are documented there.

    All attributes are read-only.
    """

    id: str
    task_name: str
    request_dict: Mapping[str, Any]
    """The headers."""
    delivery_info: Mapping[str, Any]
    body: bytes | str
    due: datetime | None
    expires: datetime | None
    time_limits: Sequence[Any]
    """Hard and soft limit in seconds, unchecked, as the sender wrote them."""

    def revoked(self) -> bool:
        """Return whether the message was revoked or has expired. If so, Celery has settled it."""

    def on_accepted(self, pid: int | None, time_accepted: float) -> None:
        """Announce that the task has started. `time_accepted` is monotonic time in seconds."""

    def on_success(self, outcome: tuple[bool, Any, float]) -> None:
        """Announce a stored result and acknowledge the message."""

    def acknowledge(self) -> None: ...

    content_type: str
    lease_id: str
    delivery: DeliveryInfo

    def regrant(self, at_least: int) -> Grant | None: ...

    def cost(self, usage: Usage | None) -> None: ...

    def call_back(self, result: Mapping[str, Any]) -> None: ...

    def finish(self, result: dict[str, Any]) -> None: ...

    def finish_as_dead_letter(self, reason: DeadLetterReason, detail: str) -> None: ...

    def requeue(self, *, is_counted: bool = False, is_preempted: bool = False, choices: int | None = None) -> None: ...

    def postpone(self, seconds: float, *, keeps_place: bool = False) -> None: ...

    def dead_letter(self, reason: DeadLetterReason, detail: str = "") -> None: ...

    def let_go(self) -> None: ...

    def announce_terminated(self) -> None: ...

    def announce_terminated_in_queue(self) -> None: ...
