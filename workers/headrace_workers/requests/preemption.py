"""`Preemption`: requeues running requests to make room for higher priorities. They resume after their last token.

Priorities are compared by the steps of the queue's lists (`keys.PRIORITY_STEPS`). 0 is the highest. Requests of one
step do not preempt each other. The step is the one that a request was sent with: ageing changes only its place in
the queue. A request that had to start by its due time counts as one of step 3, if it was sent with a lower priority.
One worker takes the request of higher priority from the queue first, and preempts others when that request is prepared.
So no two workers preempt for the same request.
"""

import structlog

from headrace_monitoring.metrics import Metrics
from headrace_workers.requests.in_flight import InFlight
from headrace_workers.requests.job import Job

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class Preemption:
    """Returns requests to the queue when requests of higher priority find no slot.

    Args:
        max_preemptions: how often one request may be preempted; 0 switches preemption off.
        max_num_seqs: choices that the engine runs at once.
        wait_seconds: see `WorkerPort.preemption_wait_seconds`.
    """

    def __init__(self, max_preemptions: int, max_num_seqs: int, metrics: Metrics, *, wait_seconds: float = 0.0) -> None:
        self.wait_seconds = wait_seconds
        self._max_preemptions = max_preemptions
        self._max_num_seqs = max_num_seqs
        self._metrics = metrics

    def preemptible_slots(self, in_flight: InFlight, num_preparing: int, *, engine_waiting: int) -> tuple[int, int]:
        """Return the step of the lowest priority in flight, and the number of choices that higher priorities may have.

        Args:
            num_preparing: choices of the messages that have been taken.
            engine_waiting: requests that wait in the engine because its memory or token budget is short. The engine
                orders them by priority, so messages of higher priority need only free slots. Other workers may have
                room, so at most `engine_waiting` choices are taken, less those that were taken and have not begun.
        """
        room = self._max_num_seqs - num_preparing - in_flight.slots_used
        if room > 0:
            if not engine_waiting or not self._max_preemptions:
                return 0, 0
            # Requests that the engine preempted itself have begun. It does not report which these are.
            worst = max((job.step for job in in_flight if job.num_unfinished), default=0)
            ahead = sum(job.num_unfinished for job in in_flight if job.step < worst and not _is_begun(job))
            return worst, max(0, min(room, engine_waiting - num_preparing - ahead))
        slots_at: dict[int, int] = {}
        for job in self._preemptible(in_flight, better=0):
            slots_at[job.step] = slots_at.get(job.step, 0) + job.num_slots
        step, slots = max(slots_at.items(), default=(0, 0))
        return step, max(0, room + slots)

    def make_room(self, in_flight: InFlight, job: Job) -> None:
        """Preempt requests of lower priority until the choices of this job, which is in flight, have slots.

        The lowest priority goes first, and among equals the request with the fewest tokens to compute again.
        """
        if in_flight.slots_used <= self._max_num_seqs or not self._preemptible(in_flight, better=job.step):
            return
        in_flight.publish_held_back()  # this may end some requests
        missing = in_flight.slots_used - self._max_num_seqs
        for victim in sorted(self._preemptible(in_flight, better=job.step), key=_preemption_order):
            if missing <= 0:
                return
            missing -= victim.num_slots
            in_flight.requeue(victim, "preempted", is_preempted=True)
            logger.info(
                "request preempted",
                **victim.log_fields,
                tokens=victim.num_done,
                preemptions=victim.preemptions + 1,
                preempted_by=job.request_id,
            )

    def _preemptible(self, in_flight: InFlight, *, better: int) -> list[Job]:
        """List the jobs that a request of the priority step `better` may preempt.

        A request that would resume with other tokens than an uninterrupted run is not preempted.
        """
        if not self._max_preemptions or in_flight.exact_resume == "none":
            return []
        return [
            job
            for job in in_flight
            if job.step > better
            and job.preemptions < self._max_preemptions
            and job.num_slots
            and (in_flight.exact_resume == "all" or not job.depends_on_draws)
        ]


def _is_begun(job: Job) -> bool:
    """Return whether the engine has reported the start of the job or its first token."""
    return job.admitted_at is not None or job.first_token_at is not None


def _preemption_order(job: Job) -> tuple[int, int, float]:
    """Sort jobs by priority, then by the tokens that a resume computes again unless a prefix cache has them."""
    lost = job.usage().prompt_tokens + job.num_done if _is_begun(job) else 0
    return -job.step, lost, -job.received_at
