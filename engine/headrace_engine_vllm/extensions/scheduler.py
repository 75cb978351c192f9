"""vLLM's schedulers, extended to resume requests and to count the work of each step.

A request that resumes is queued with its emitted tokens as output, like a request that vLLM has preempted. So
max_tokens, min_tokens, stop checks, repetition detection and block hashes count from the end of the prompt. So do
penalties, bad words and draws in the model runner. If the emitted tokens were a part of the prompt, all of these would
change.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from headrace_engine.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The work of a step. Ids are vLLM's."""

    num_tokens: int
    num_requests: int
    num_prefill_tokens: int
    new_ids: list[str]
    num_preempted: int
    seconds: float


class ResumingScheduler(Scheduler):
    """A scheduler that resumes requests. It is at module level, so that ranks in other processes can import it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.emitted: dict[str, list[int]] = {}
        """vLLM's request id -> tokens of an earlier attempt, while the request is being added."""
        self.steps: list[ScheduledStep] = []
        """Steps since the last `take_steps`."""

    def add_request(self, request: "Request") -> None:
        emitted = self.emitted.pop(request.request_id, None)
        if emitted:
            request.append_output_token_ids(list(emitted))
            # vLLM asserts that a request without preemptions has computed at most its prompt
            request.num_preemptions = 1
            if request.use_structured_output:
                self._advance_grammar(request, list(emitted))
        super().add_request(request)

    def _advance_grammar(self, request: "Request", emitted: list[int]) -> None:
        outputs = request.structured_output_request
        assert outputs is not None
        compiled: Any = outputs._grammar

        def advanced() -> Any:
            grammar = compiled.result() if isinstance(compiled, Future) else compiled
            if not grammar.accept_tokens(request.request_id, emitted):
                raise ValueError("the grammar does not allow the tokens that an earlier attempt has emitted")
            return grammar

        # The pool that compiles the grammar takes its tasks in order, so `advanced` runs after the compilation started.
        outputs.grammar = self.structured_output_manager.executor.submit(advanced)

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":
        started = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        seconds = time.perf_counter() - started
        num_prefill_tokens = 0
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if request.num_computed_tokens - count < request.num_prompt_tokens or count > 1 + self.num_spec_tokens:
                num_prefill_tokens += count
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]
            if request.num_output_tokens and new.prefill_token_ids is None:
                new.prefill_token_ids = list(request.all_token_ids)  # for runner_v1
        self.steps.append(
            ScheduledStep(
                output.total_num_scheduled_tokens,
                len(output.num_scheduled_tokens),
                num_prefill_tokens,
                [new.req_id for new in output.scheduled_new_reqs],
                len(output.preempted_req_ids or ()),
                seconds,
            )
        )
        return output

    def take_steps(self) -> list[ScheduledStep]:
        steps, self.steps = self.steps, []
        return steps

    def wait_for_grammars(self, seconds: float) -> None:
        """Wait at most `seconds` until a grammar is compiled. Return at once if none is being compiled."""
        outputs = (request.structured_output_request for request in self.requests.values())
        compiling = [found._grammar for found in outputs if found is not None and isinstance(found._grammar, Future)]
        if compiling:
            wait(compiling, seconds, "FIRST_COMPLETED")


class ResumingAsyncScheduler(ResumingScheduler, AsyncScheduler):
    """A `ResumingScheduler` for async scheduling. Steps overlap only with vLLM's `AsyncScheduler` as a base."""


_EXTENDED: Final[dict[type, Callable[..., Any]]] = {
    Scheduler: ResumingScheduler,
    AsyncScheduler: ResumingAsyncScheduler,
}


def resuming(base: type) -> Callable[..., Any]:
    """Return the extended scheduler for vLLM's scheduler class `base`. Raises ConfigError if there is none."""
    if base not in _EXTENDED:
        name = f"{base.__module__}.{base.__name__}"
        raise ConfigError(f"vLLM chooses the scheduler {name}, which cannot resume requests")
    return _EXTENDED[base]
