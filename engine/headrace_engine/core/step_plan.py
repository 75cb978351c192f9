"""The plan of a step while the scheduler builds it: how many tokens each request computes. Imports no torch."""

from dataclasses import dataclass, field

from headrace_engine.requests.request import Request
from headrace_engine.runner.contracts import NewRequest, StepBatch


@dataclass(slots=True)
class StepPlan:
    """A batch under construction, and what is left of its token budget."""

    budget: int
    """Tokens left to schedule."""
    batch: StepBatch = field(default_factory=lambda: StepBatch(num_scheduled_tokens={}))
    num_prefills: int = 0

    def grant(self, request: Request, num_tokens: int, prefill: bool) -> None:
        """Schedule tokens of a request. They count as computed from now on."""
        request.num_computed_tokens += num_tokens
        self.batch.num_scheduled_tokens[request.request_id] = num_tokens
        self.budget -= num_tokens
        self.num_prefills += prefill

    def withdraw(self, request: Request) -> None:
        """Undo `grant` for a request that is preempted in the same step, if it was granted tokens."""
        num_tokens = self.batch.num_scheduled_tokens.pop(request.request_id, 0)
        self.batch.new_block_ids.pop(request.request_id, None)
        self.batch.draft_token_ids.pop(request.request_id, None)
        request.num_computed_tokens -= num_tokens
        self.budget += num_tokens
        self.num_prefills -= bool(num_tokens) and is_prefill(request)


def is_prefill(request: Request) -> bool:
    """Whether more than the last token is left to compute: of a new prompt, or after a preemption."""
    return request.num_tokens - request.num_computed_tokens > 1


def ends_with_pending(request: Request, max_model_len: int) -> bool:
    """Whether the request reaches its length limit with the tokens in flight."""
    pending, max_tokens = request.num_pending_tokens, request.sampling_params.max_tokens
    if request.num_tokens + pending >= max_model_len:
        return True
    return max_tokens is not None and request.num_output_tokens + pending >= max_tokens


def new_request(
    request: Request, block_ids: list[int], state: tuple[int | None, int | None] = (None, None)
) -> NewRequest:
    """Describe a request to a runner that does not know it, or has forgotten it."""
    return NewRequest(
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
        seed=request.seed,
        suppressed_token_ids=sorted(request.eos_token_ids | request.stop_token_ids),
        block_ids=block_ids,
        num_computed_tokens=request.num_computed_tokens,
        bad_words_token_ids=request.bad_words_token_ids,
        num_prompt_logprobs=None if request.prompt_logprobs is None else len(request.prompt_logprobs),
        lora_version=request.lora.version if request.lora is not None else None,
        state_slot=state[0],
        state_source=state[1],
    )
