"""`Preemption`: running requests make room for requests of better priorities, and go on later behind their last token.

Priorities are compared by the steps of the queue's lists (`keys.PRIORITY_STEPS`), so those of one list are equal and
preempt nothing. That is the step that a request was sent with, whatever it has aged to: ageing is a place in the queue,
and neither makes room nor keeps it. A better request is taken from the queue first, by one worker alone, and makes room
for itself when it is prepared: so no two workers preempt for the same one.
"""

import structlog

from headrace_monitoring.metrics import Metrics
from headrace_workers.in_flight import InFlight
from headrace_workers.job import Job

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class Preemption:
    """Hands requests back to the queue where better ones find no slot.

    Args:
        max_preemptions: so often a request makes room, then it stays; 0 switches preemption off.
        max_num_seqs: choices that the engine runs at once.
    """

    def __init__(self, max_preemptions: int, max_num_seqs: int, metrics: Metrics) -> None:
        self._max_preemptions = max_preemptions
        self._max_num_seqs = max_num_seqs
        self._metrics = metrics

    def credit(self, in_flight: InFlight, num_preparing: int, *, engine_waiting: int) -> tuple[int, int]:
        """The worst step that would make room, and how many more messages of better steps may then be taken.

        Args:
            num_preparing: messages that have been taken and will have a choice at least.
            engine_waiting: so many requests wait in the engine, whose memory or budget of tokens is short. Better ones
                go before those of worse steps there, and need only the free slots; no more are taken than wait, less
                the better ones that have not begun, as other workers may have room.
        """
        room = self._max_num_seqs - num_preparing - in_flight.slots_used
        if room > 0:
            if not engine_waiting or not self._max_preemptions:
                return 0, 0
            # Those that the engine itself has evicted have begun, and which these are it does not say.
            worst = max((job.step for job in in_flight if job.num_unfinished), default=0)
            ahead = sum(job.num_unfinished for job in in_flight if job.step < worst and not _is_begun(job))
            return worst, max(0, min(room, engine_waiting - num_preparing - ahead))
        slots_at: dict[int, int] = {}
        for job in self._preemptible(in_flight, better=0):
            slots_at[job.step] = slots_at.get(job.step, 0) + job.num_unfinished
        step, slots = max(slots_at.items(), default=(0, 0))
        return step, max(0, room + slots)

    def make_room(self, in_flight: InFlight, job: Job) -> None:
        """Hand requests of worse steps back as far as the choices of this one, which is in flight, find no slots.

        The worst goes first, and of equals the one that loses least.
        """
        if in_flight.slots_used <= self._max_num_seqs or not self._preemptible(in_flight, better=job.step):
            return
        in_flight.publish_held_back()  # with which some may end
        missing = in_flight.slots_used - self._max_num_seqs
        for victim in sorted(self._preemptible(in_flight, better=job.step), key=_worth):
            if missing <= 0:
                return
            missing -= victim.num_unfinished
            in_flight.hand_back(victim, "preempted", is_preempted=True)
            logger.info(
                "request preempted",
                **victim.log_fields,
                tokens=victim.num_tokens,
                preemptions=victim.preemptions + 1,
                preempted_by=job.request_id,
            )

    def _preemptible(self, in_flight: InFlight, *, better: int) -> list[Job]:
        """Those that may make room for a request of the priority step `better`.

        A request that would go on with other tokens than an undisturbed one may not.
        """
        if not self._max_preemptions or in_flight.exact_resume == "none":
            return []
        return [
            job
            for job in in_flight
            if job.step > better
            and job.preemptions < self._max_preemptions
            and job.num_unfinished
            and (in_flight.exact_resume == "all" or job.request.params.is_greedy)
        ]


def _is_begun(job: Job) -> bool:
    """Whether the engine has computed something of it, as far as the engine says."""
    return job.admitted_at is not None or job.first_token_at is not None


def _worth(job: Job) -> tuple[int, int, float]:
    """What is computed again when the request goes on is its tokens, as far as no prefix cache has them."""
    lost = len(job.request.prompt_token_ids) + job.num_tokens if _is_begun(job) else 0
    return -job.step, lost, -job.received_at
