"""`SimulatedWorker`: the requests that a worker prepares, its engine, and how many messages it takes."""

from collections import OrderedDict
from dataclasses import dataclass, field

from fleet_model.arrivals import Request
from fleet_model.engine import SimulatedEngine
from headrace_workers.requests import fetch_quantum
from headrace_workers.requests.token_credit import TokenCredit


@dataclass(eq=False)
class SimulatedWorker:
    number: int
    slots: int
    quantum: int
    engine: SimulatedEngine
    token_credit: TokenCredit | None = None
    """Set for a model that embeds."""
    preparing: dict[Request, None] = field(default_factory=dict)
    """Requests that it has taken and that its engine does not have yet."""
    sessions: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Conversations of its latest messages, the newest last."""
    is_dead: bool = False

    def free_slots(self) -> int:
        """Return how many messages a fetch may take now, as `Admission.free_slots` does."""
        credit, quantum = self.token_credit, self.quantum
        if self.is_dead or (self.engine.num_waiting and credit is None):  # requests to embed wait there by design
            return 0
        if credit is not None:
            quantum = max(quantum, credit.step_messages)
        room = fetch_quantum.choices_to_fetch(
            max_num_seqs=self.slots,
            quantum=quantum,
            slots_used=self.engine.slots_used,
            num_preparing=len(self.preparing),
            num_slow=0,
            num_for_next_step=self.engine.num_for_next_step,
            num_ended=self.engine.num_ended,
        )
        if credit is None or room <= 0:
            return room
        backlog = self.engine.num_prompt_left + sum(request.num_prompt for request in self.preparing)
        return min(room, credit.messages(backlog, self.engine.slots_used + len(self.preparing)))

    def remember(self, session: int, most: int) -> None:
        self.sessions.pop(session, None)
        self.sessions[session] = None
        while len(self.sessions) > most:
            self.sessions.popitem(last=False)

    def die(self, now: float) -> list[Request]:
        """Lose all requests, and return them."""
        self.is_dead = True
        lost = [*self.preparing, *self.engine.stop(now)]
        self.preparing.clear()
        self.sessions.clear()
        return lost
