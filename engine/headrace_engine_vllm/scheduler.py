"""vLLM's schedulers with what a resumed request needs, and with the numbers of each step.

A request that resumes is queued with its emitted tokens as output, as vLLM has a request that it preempted. Then
max_tokens, min_tokens, stop checks, repetition detection and block hashes count from the end of the prompt, and so do
penalties, bad words and draws in the model runner. With the emitted tokens as part of the prompt they would not.
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
    """What a step computes. Ids are vLLM's."""

    num_tokens: int
    num_requests: int
    num_prefill_tokens: int
    new_ids: list[str]
    num_preempted: int
    seconds: float


class ResumingScheduler(Scheduler):
    """At module level, so that ranks in other processes can name it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.emitted: dict[str, list[int]] = {}
        """Tokens of earlier attempts, by vLLM's id, of requests that are about to be added."""
        self.steps: list[ScheduledStep] = []
        """Since the core last took them."""

    def add_request(self, request: "Request") -> None:
        emitted = self.emitted.pop(request.request_id, None)
        if emitted:
            request.append_output_token_ids(list(emitted))
            # A request that was not preempted has no more computed tokens than its prompt has: an assertion says so.
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

        # Behind the compilation in the same pool, whose threads take tasks in order: it is running or done by then.
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
                new.prefill_token_ids = list(request.all_token_ids)  # for model runner v1: see runner_v1
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
        """Return when a grammar is compiled, or after so many seconds; at once where none is being compiled."""
        outputs = (request.structured_output_request for request in self.requests.values())
        compiling = [found._grammar for found in outputs if found is not None and isinstance(found._grammar, Future)]
        if compiling:
            wait(compiling, seconds, "FIRST_COMPLETED")


class ResumingAsyncScheduler(ResumingScheduler, AsyncScheduler):
    """The same on vLLM's scheduler for async scheduling, whose overlap `Scheduler` would lose without a word."""


_FORMS: Final[dict[type, Callable[..., Any]]] = {Scheduler: ResumingScheduler, AsyncScheduler: ResumingAsyncScheduler}


def resuming(base: type) -> Callable[..., Any]:
    """The resuming form of the scheduler that vLLM would take. Raises ConfigError where there is none."""
    if base not in _FORMS:
        name = f"{base.__module__}.{base.__name__}"
        raise ConfigError(f"vLLM takes the scheduler {name}, in which requests cannot be resumed")
    return _FORMS[base]
