"""`Preparation`: the messages that this worker has taken but not checked yet.

    begin --plain------------prepared--> adapter's folder --> `ready`
      +---> quick process ---prepared-->
                 |  `slow`
                 +--> slow process, tenants in turn --prepared-->

Small messages go to a process that spends a fraction of a second on each, so that no long prompt, new grammar or
endless chat template of one tenant delays them. Messages that need more go to a second process. Plain requests need no
process; see `PlainRequests`. Runs on the event loop's thread only.
"""

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final

from headrace_engine.requests.lora_request import LoRARequest
from headrace_wire.codes import ErrorCode
from headrace_wire.errors import CopyableError
from headrace_workers.engine_link.adapters import Adapters
from headrace_workers.preparation.celery_request import CeleryRequest
from headrace_workers.preparation.decision_intake import PreparedDecision
from headrace_workers.preparation.file_lookups import FileLookups
from headrace_workers.preparation.intake import Incoming, Prepared, RefusedError
from headrace_workers.preparation.plain_requests import AnyPrepared, PlainRequests
from headrace_workers.preparation.pooling_intake import PreparedInputs
from headrace_workers.preparation.preparer_process import MakeProcess
from headrace_workers.preparation.process import QUICK_BODY_BYTES
from headrace_workers.preparation.tokenizer_answers import error_answer

ADAPTER_SECONDS: Final = 5.0
"""A request is refused if the file system does not answer within this time."""
POSTPONE_SECONDS: Final = 1.0


class _Calls(Enum):
    """Stands in place of a tenant, for all tokenizer calls together."""

    CALLS = 0


@dataclass(slots=True, eq=False)
class Preparing:
    """One message, from its receipt to the claim of its stream."""

    number: int
    incoming: Incoming
    celery_request: CeleryRequest
    is_slow: bool = False
    prepared: AnyPrepared | None = None
    """Set while the message waits only for its adapter."""
    since: float = field(default_factory=time.monotonic)
    """Monotonic time at which the search for the adapter began."""

    @property
    def request_id(self) -> str:
        return self.incoming.request_id

    @property
    def body(self) -> list[Any]:
        request = self.celery_request
        return [self.request_id, request.content_type, request.body, request.task_name]


class Preparation:
    """Prepares messages. Passes each to one of the four callbacks below, and then no longer holds it.

    Args:
        make_process: makes the two processes; the slow one gets one message at a time.
        max_messages: messages held at once. At most half may be slow. At most a quarter may be slow ones of one tenant.
        ready: called with the message, the prepared request and its adapter.
        refused: called with the message and the reason why it cannot be served.
        undecodable: called with a message whose body does not match its content type, and the problem.
        postponed: called with a slow message for which there is no room now.
    """

    def __init__(
        self,
        make_process: MakeProcess,
        adapters: Adapters,
        served_name: str,
        *,
        max_messages: int,
        ready: Callable[[Preparing, AnyPrepared, LoRARequest | None], None],
        refused: Callable[[Preparing, Exception], None],
        undecodable: Callable[[Preparing, str], None],
        postponed: Callable[[Preparing], None],
    ) -> None:
        # The quick process compiles no grammar.
        self._quick = make_process(is_quick=True, on_answer=self._on_answer, on_verdict=lambda _grammar, _problem: None)
        self._slow = make_process(is_quick=False, on_answer=self._on_answer, on_verdict=self._quick.learn)
        self._plain: PlainRequests | None = None
        self._lookups = FileLookups()
        self._adapters = adapters
        self._served_name = served_name
        self._max_slow = max(1, max_messages // 2)
        self._max_slow_of_tenant = max(1, max_messages // 4)
        self._ready = ready
        self._refused = refused
        self._undecodable = undecodable
        self._postponed = postponed
        self._numbers = itertools.count(1)
        self._held: dict[int, Preparing] = {}
        self._by_id: dict[str, Preparing] = {}
        self._waiting: OrderedDict[str | _Calls | None, deque[Preparing | int]] = OrderedDict()
        """Work for the slow process by tenant, the next tenant first. Tokenizer calls are numbers, under `_Calls`."""
        self._in_slow_process: int | None = None
        self._calls: dict[int, tuple[str, bytes, Callable[[bytes], None]]] = {}
        """Tokenizer calls by number. Their numbers are below 0."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_choices(self) -> int:
        """Number of choices of the held messages, as the queue has recorded it."""
        return sum(message.celery_request.delivery.choices for message in self._held.values())

    @property
    def num_slow_choices(self) -> int:
        """Number of those choices whose messages need the slow process, or wait for the folder of an adapter."""
        slow = (message for message in self._held.values() if message.is_slow or message.prepared is not None)
        return sum(message.celery_request.delivery.choices for message in slow)

    @property
    def num_body_bytes(self) -> int:
        """Size of the bodies of the held messages."""
        return sum(len(message.celery_request.body) for message in self._held.values())

    @property
    def problem(self) -> str | None:
        """Why the worker must take no messages; None if it may. Those for the slow process may wait for its start."""
        if self._quick.is_failing or self._slow.is_failing:
            return "a preparation process fails at its start; its error is in the log"
        return None if self._quick.is_ready else "the preparation process is starting"

    def get(self, request_id: str) -> Preparing | None:
        return self._by_id.get(request_id)

    def start(self) -> None:
        """Start the processes."""
        self._quick.start()
        self._slow.start()

    def attach(self, hub: Any) -> None:
        """Run in this event loop; called again after each reconnect."""
        self._lookups.attach(hub)
        self._quick.attach(hub)
        self._slow.attach(hub)

    def configure(self, settings: dict[str, Any], plain: PlainRequests | None) -> None:
        """Set the processes' settings (see `preparer.make_preparer`) and the preparer of plain requests."""
        self._plain = plain
        self._quick.configure({**settings, "is_quick": True})
        self._slow.configure({**settings, "is_quick": False})

    def begin(self, incoming: Incoming, celery_request: CeleryRequest) -> None:
        """Take a message and start to prepare it."""
        message = Preparing(next(self._numbers), incoming, celery_request)
        prepared = self._prepare_plain(message)
        self._held[message.number] = self._by_id[message.request_id] = message
        if prepared is not None:
            self._find_adapter(message, prepared)
        elif len(celery_request.body) <= QUICK_BODY_BYTES:
            self._quick.submit(message.number, message.body)
        else:
            self._begin_slow(message)

    def _prepare_plain(self, message: Preparing) -> AnyPrepared | None:
        """Prepare a plain request on this thread. Returns None if a process must prepare it.

        It must not overtake messages of the quick process, so while there are any, a process prepares it.
        """
        if self._plain is None or any(not other.is_slow for other in self._held.values()):
            return None
        return self._plain.prepare(*message.body)

    def answer_call(self, kind: str, body: bytes, answered: Callable[[bytes], None]) -> None:
        """Pass a tokenizer call to the processes, which also answer such calls; see `tokenizer_answers.py`."""
        number = -next(self._numbers)
        self._calls[number] = kind, body, answered
        if len(body) <= QUICK_BODY_BYTES:
            self._quick.submit(number, [kind, body])
        else:
            self._wait_for_slow_process(_Calls.CALLS, number)

    def drop(self, message: Preparing) -> None:
        """Forget a message. The caller must settle it. A later answer of a process for it is ignored."""
        del self._held[message.number], self._by_id[message.request_id]
        waiting = self._waiting.get(message.incoming.tenant)
        if waiting is not None and message in waiting:
            waiting.remove(message)
            if not waiting:
                del self._waiting[message.incoming.tenant]

    def drop_all(self) -> list[Preparing]:
        """Drop all messages and return them in the order of receipt."""
        dropped = list(self._held.values())
        for message in dropped:
            self.drop(message)
        return dropped

    def heartbeat(self) -> list[Preparing]:
        """End processes and messages that take too long. Call it once a second. Returns the messages that remain."""
        self._quick.check()
        self._slow.check()
        for message in list(self._held.values()):
            if message.prepared is not None and time.monotonic() - message.since > ADAPTER_SECONDS:
                self.drop(message)
                folder = f"the folder of LoRA adapter {message.prepared.lora!r}"
                problem = f"{folder} could not be read within {ADAPTER_SECONDS:g} s"
                self._refused(message, RefusedError(ErrorCode.ENGINE_ERROR, problem))
        return list(self._held.values())

    def close(self) -> None:
        self._quick.close()
        self._slow.close()

    # -- answers --------------------------------------------------------------------------------------------------

    def _on_answer(self, number: int, answer: list[Any]) -> None:
        kind, *values = answer
        if number == self._in_slow_process:
            self._in_slow_process = None
        message = self._held.get(number)
        try:
            if number < 0:
                self._on_call_answered(number, kind, values)
            elif message is not None:  # else it was dropped meanwhile
                self._take_answer(message, kind, values)
        finally:  # last: an error in the next message must not lose the answer to this one
            self._feed_slow_process()

    def _on_call_answered(self, number: int, kind: str, values: list[Any]) -> None:
        if kind == "slow":
            self._wait_for_slow_process(_Calls.CALLS, number)
            return
        _, _, answered = self._calls.pop(number)
        answered(values[0] if kind == "answered" else error_answer(*values))

    def _take_answer(self, message: Preparing, kind: str, values: list[Any]) -> None:
        if kind == "slow":
            self._begin_slow(message)
        elif kind == "prepared":
            self._find_adapter(message, _prepared_of(values[0]))
        else:
            self.drop(message)
            if kind == "undecodable":
                self._undecodable(message, *values)
            elif kind == "refused":
                self._refused(message, RefusedError(*values))
            else:
                self._refused(message, PreparationError(*values))

    def _begin_slow(self, message: Preparing) -> None:
        tenant = message.incoming.tenant
        slow = [other.incoming.tenant for other in self._held.values() if other.is_slow]
        if len(slow) >= self._max_slow or slow.count(tenant) >= self._max_slow_of_tenant:
            self.drop(message)
            self._postponed(message)
            return
        message.is_slow = True
        self._wait_for_slow_process(tenant, message)

    def _wait_for_slow_process(self, tenant: str | _Calls | None, work: Preparing | int) -> None:
        self._waiting.setdefault(tenant, deque()).append(work)
        self._feed_slow_process()

    def _feed_slow_process(self) -> None:
        while self._in_slow_process is None and self._waiting:
            tenant, waiting = self._waiting.popitem(last=False)
            message = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting  # behind the other tenants
            if isinstance(message, int):
                self._in_slow_process = message
                self._slow.submit(message, [*self._calls[message][:2]])
                continue
            self._in_slow_process = message.number
            try:
                self._slow.submit(message.number, message.body)
            except Exception as error:  # noqa: BLE001  # not sent: answer it and continue with the next one
                self._in_slow_process = None
                self.drop(message)
                self._refused(message, error)

    # -- adapters -------------------------------------------------------------------------------------------------

    def _find_adapter(self, message: Preparing, prepared: AnyPrepared) -> None:
        if prepared.lora is None:
            self.drop(message)
            self._ready(message, prepared, None)
            return
        message.prepared, message.since = prepared, time.monotonic()
        find, found = partial(self._adapters.find, prepared.lora), partial(self._adapter_found, prepared.lora)
        # Requests that wait for a lookup that hangs keep the worker from other messages, so only the first ones wait.
        if not self._lookups.submit(prepared.lora, find, found, 2 * ADAPTER_SECONDS):
            self.drop(message)
            problem = "the folders of LoRA adapters cannot be read at the moment"
            self._refused(message, RefusedError(ErrorCode.ENGINE_ERROR, problem))

    def _adapter_found(self, name: str, adapter: LoRARequest | None) -> None:
        """Continue all messages that wait for this adapter."""
        for message in list(self._held.values()):
            prepared = message.prepared
            if prepared is None or prepared.lora != name or message.number not in self._held:
                continue
            self.drop(message)
            if adapter is None:
                problem = f"{self._served_name} has no LoRA adapter named {name!r}"
                self._refused(message, RefusedError(ErrorCode.INVALID_REQUEST, problem))
            else:
                self._ready(message, prepared, adapter)


def _prepared_of(values: dict[str, Any]) -> AnyPrepared:
    if "inputs" in values:
        return PreparedInputs(**values)
    return PreparedDecision(**values) if "questions" in values else Prepared(**values)


class PreparationError(CopyableError):
    """An unexpected error in the preparation process, with its type and where it was raised."""

    def __init__(self, kind: str, raised: Any) -> None:
        self.kind = kind
        self.raised = raised
        super().__init__(kind)
