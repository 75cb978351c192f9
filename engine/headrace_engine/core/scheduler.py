"""The scheduler: decides how many tokens of each request the next step computes.

There is no prefill phase and no decode phase. Each request has `num_computed_tokens`, which catches up with its
`num_tokens`. A step has a token budget: running requests get tokens first, in the order of their admission, then
waiting requests in policy order. A prompt longer than the budget is computed in chunks. After a prefix cache hit,
`num_computed_tokens` starts at the length of the hit. A preemption sets it back to 0. After vLLM's V1 scheduler.
Imports no torch.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from headrace_engine.core.block_pool import Block
from headrace_engine.core.grammars import GrammarStates
from headrace_engine.core.kv_cache_manager import KVCacheManager
from headrace_engine.core.outputs import EngineCoreOutput, StepStats
from headrace_engine.core.request_queue import QueueLimits, create_request_queue
from headrace_engine.core.speculation import Speculator
from headrace_engine.core.state_slots import StateSlots
from headrace_engine.core.step_plan import StepPlan, ends_with_pending, is_prefill, new_request
from headrace_engine.core.stop_check import check_stop
from headrace_engine.errors import ContextLengthError, DuplicateRequestError
from headrace_engine.grammar.grammar import Grammar
from headrace_engine.options.config import SchedulerConfig
from headrace_engine.options.speculative_config import SpeculativeConfig
from headrace_engine.requests.request import FinishReason, Request, RequestState
from headrace_engine.runner.contracts import RunnerCapabilities, StepBatch, StepOutput

# A step holds the logits of all scheduled prompt tokens of a request that wants their log-probabilities.
_MAX_PROMPT_LOGPROBS_CHUNK = 512
_NO_DRAFTS: list[int] = []  # this list and the next are shared and never changed
_NO_BLOCKS: list[int] = []


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        capabilities: RunnerCapabilities,
        max_model_len: int,
        speculative: SpeculativeConfig | None = None,
        *,
        max_loras: int = 0,
    ) -> None:
        self.kv = kv
        self.max_model_len = max_model_len
        self._policy = config.policy
        self._capabilities = capabilities
        self._max_num_seqs = min(config.max_num_seqs, capabilities.max_batch or config.max_num_seqs)
        if kv.states is not None:
            self._max_num_seqs = min(self._max_num_seqs, kv.states.num_slots)
        self._token_budget = config.max_num_batched_tokens
        self._max_chunk = max(capabilities.chunk_sizes) if capabilities.chunk_sizes else self._token_budget
        self._max_loras = max_loras
        if config.long_prefill_token_threshold:
            self._max_chunk = min(self._max_chunk, config.long_prefill_token_threshold)
        self._watermark_blocks = int(config.watermark * kv.pool.num_usable)
        self._speculator = Speculator(speculative, max_model_len) if speculative is not None else None
        self.queue_limits = QueueLimits(config.max_num_queued_requests, config.max_num_queued_tokens)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = create_request_queue(config.policy)
        self._has_just_prefilled = False
        self.grammars = GrammarStates()
        self._removed: list[str] = []
        """Ids that the runner must forget at the start of the next step."""
        self._without_grammar: list[tuple[Request, Grammar]] = []
        self.stats = StepStats()

    # -- arrivals and departures ----------------------------------------------------------------------------------

    def add_request(self, request: Request, grammar: Grammar | None = None) -> None:
        """Queue a request. Its grammar, if it has one, must have been advanced by the output so far."""
        if request.request_id in self.requests:
            raise DuplicateRequestError(f"request {request.request_id} is in the engine already")
        if not 0 < request.num_tokens < self.max_model_len:
            raise ContextLengthError(
                f"the request has {request.num_tokens} tokens, must have at least 1 and less than {self.max_model_len}"
            )
        if request.status is RequestState.PREEMPTED:  # the request returns with another grammar
            self.waiting.add_first(request)
        else:
            self.queue_limits.enter(request.request_id, request.num_tokens)
            self.waiting.add(request)
        self.requests[request.request_id] = request
        if grammar is not None:
            self.grammars.add(request.request_id, grammar)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests in any state. Return their ids. Unknown ids, also of finished requests, are ignored."""
        aborted = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                if request.status is RequestState.RUNNING:
                    self.running.remove(request)
                else:
                    self.waiting.remove(request)
                    self.queue_limits.leave(request.request_id)
                self._finish(request)
                aborted.append(request_id)
        return aborted

    def take_requests_without_grammar(self) -> list[tuple[Request, Grammar]]:
        """Return the requests whose grammars failed in the last step. Add them again with other grammars."""
        taken, self._without_grammar = self._without_grammar, []
        return taken

    def has_work(self) -> bool:
        """Whether a step is needed: for a request, or to remove ended requests from the runner."""
        return bool(self.requests or self._removed)

    # -- one step -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepBatch:
        """Return the batch of the next step. It is empty if the step can only preempt."""
        plan = StepPlan(budget=self._token_budget)
        self.stats = StepStats()
        if self._capabilities.mixed_batches:
            self._schedule_running(plan)
            self._schedule_waiting(plan)
        elif self._decode_is_due() or not self._prefill_is_possible():
            self._schedule_running(plan, phase="decode")
        else:
            self._schedule_running(plan, phase="prefill")
            self._schedule_waiting(plan)
        self._has_just_prefilled = plan.num_prefills > 0
        # The runner must also forget the requests preempted in this step: others may have their blocks already.
        plan.batch.removed_request_ids, self._removed = self._removed, []
        if self.kv.states is not None:
            self._plan_snapshots(self.kv.states, plan.batch)
        if self.grammars:
            plan.batch.grammar_bitmask = self.grammars.bitmask(self._sampled(plan.batch))
        self._describe(plan.batch)
        return plan.batch

    def _plan_snapshots(self, states: StateSlots, batch: StepBatch) -> None:
        """Plan the snapshots of recurrent states when the batch is final: what is admitted needs slots first."""
        for request_id, count in batch.num_scheduled_tokens.items():
            snapshots = states.plan_snapshots(self.requests[request_id], count)
            if snapshots:
                batch.state_snapshots[request_id] = snapshots

    def _decode_is_due(self) -> bool:
        """Whether this step decodes, for runners that cannot mix prefill and decode.

        Decoding requests wait for at most one step of prefill, and prefill waits for at most one step of decoding. So
        neither starves the other.
        """
        return self._has_just_prefilled and not all(is_prefill(request) for request in self.running)

    def _sampled(self, batch: StepBatch) -> list[tuple[Request, Sequence[int]]]:
        """Return the requests that get a token in this step, with their drafts."""
        sampled: list[tuple[Request, Sequence[int]]] = []
        for request_id in batch.num_scheduled_tokens:
            request, drafts = self.requests[request_id], batch.draft_token_ids.get(request_id, ())
            if request.num_computed_tokens == request.num_tokens + len(drafts):
                sampled.append((request, drafts))
        return sampled

    def expect_tokens(self, batch: StepBatch) -> list[Request]:
        """Count the tokens that the step will draw, so that the next step can be scheduled before they are known.

        Returns:
            The requests of the batch, for `update_from_output`.
        """
        requests = [self.requests[request_id] for request_id in batch.num_scheduled_tokens]
        for request in requests:
            if request.num_computed_tokens == request.num_tokens + request.num_pending_tokens:
                request.num_pending_tokens += 1
        return requests

    def _prefill_is_possible(self) -> bool:
        """Whether a prompt is incomplete or can be admitted whole, for runners that cannot mix prefill and decode."""
        if any(is_prefill(request) for request in self.running):
            return True
        if not self.waiting:
            return False
        request = self.waiting.peek()
        hits = self.kv.computed_blocks(request)
        needed = self.kv.num_needed(hits, request.num_tokens)
        return self._has_room(needed) or self._victims(request, hits, needed) is not None

    def _schedule_running(self, plan: StepPlan, phase: Literal["prefill", "decode"] | None = None) -> None:
        running, extend = self.running, self.kv.extend
        index = 0
        while index < len(running) and plan.budget > 0:
            request = running[index]
            pending = request.num_pending_tokens
            if pending and ends_with_pending(request, self.max_model_len):
                index += 1
                continue
            num_new = len(request.token_ids) + pending - request.num_computed_tokens
            assert num_new > 0, f"{request.request_id} runs but has nothing to compute"
            prefill = num_new > 1
            if (phase is not None and prefill != (phase == "prefill")) or (prefill and not self._may_prefill(plan)):
                index += 1
                continue
            if prefill:  # a single token is within every limit
                num_new = min(num_new, plan.budget, self._chunk_limit(request))
            drafts, new_blocks = _NO_DRAFTS, None
            if self._speculator is not None:
                drafts = self._drafts_within(request, plan.budget - (len(running) - index - 1))
                new_blocks = self._extend_for_drafts(request, num_new, drafts)
            if new_blocks is None:
                drafts = _NO_DRAFTS  # no request is preempted for drafts
                # Usually there is room. This check saves a call, which is a fifth of the scheduling time per request.
                has_room = request.num_computed_tokens + num_new <= request.num_slots
                new_blocks = _NO_BLOCKS if has_room else extend(request, num_new)
            while new_blocks is None:
                victim = self._choose_victim()
                if running.index(victim) < index:
                    index -= 1
                plan.withdraw(victim)
                self._preempt(victim)
                if victim is request:
                    break
                new_blocks = extend(request, num_new)
            else:
                plan.grant(request, num_new + len(drafts), prefill)
                if drafts:
                    plan.batch.draft_token_ids[request.request_id] = drafts
                if new_blocks:
                    plan.batch.new_block_ids[request.request_id] = new_blocks
                index += 1

    def _drafts_within(self, request: Request, num_tokens: int) -> list[int]:
        """Return the drafts that fit in `num_tokens` together with the last token."""
        if not request.draft_token_ids or is_prefill(request):
            return []
        return request.draft_token_ids[: max(min(num_tokens, self._max_chunk) - 1, 0)]

    def _extend_for_drafts(self, request: Request, num_new: int, drafts: list[int]) -> list[int] | None:
        """Allocate blocks for drafts and, if there are enough, for the tokens that the runner drafts next.

        Return the ids of the new blocks, or None if there are too few for the drafts.
        """
        assert self._speculator is not None
        num_new += len(drafts)
        lookahead = self._speculator.num_lookahead_tokens(request.num_computed_tokens + num_new)
        new_blocks = self.kv.extend(request, num_new + lookahead)
        return self.kv.extend(request, num_new) if new_blocks is None else new_blocks

    def _chunk_limit(self, request: Request) -> int:
        if request.prompt_logprobs is None:
            return self._max_chunk
        return min(self._max_chunk, _MAX_PROMPT_LOGPROBS_CHUNK) if self._capabilities.logits_of_every_token else 1

    def _may_prefill(self, plan: StepPlan) -> bool:
        limit = self._capabilities.max_prefills_per_step
        return limit is None or plan.num_prefills < limit

    def _choose_victim(self) -> Request:
        if self._policy == "priority":
            return max(self.running, key=_urgency)
        return self.running[-1]

    def _preempt(self, request: Request) -> None:
        """Free the blocks of a request. It keeps its tokens and computes them again when it is admitted again."""
        self._suspend(request)
        self.waiting.add_first(request)
        self.stats.preemptions += 1

    def _suspend(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request)
        request.status = RequestState.PREEMPTED
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        self._removed.append(request.request_id)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        if self.stats.preemptions:
            return  # memory is short: running requests go first
        loras = {r.lora.version for r in self.running if r.lora is not None} if self._max_loras else set()
        passed: list[Request] = []  # requests whose adapter does not fit in this batch
        while self.waiting and plan.budget > 0 and self._may_prefill(plan):
            request = self.waiting.peek()
            if request.num_pending_tokens:
                break  # preempted with a token in flight: the request is admitted when all its tokens are known
            if request.lora is not None and not self._lora_may_start(request, request.lora.version, loras, passed):
                if self._policy == "fcfs" and len(self.running) == self._max_num_seqs:
                    break
                passed.append(self.waiting.pop())
                continue
            hits = self.kv.computed_blocks(request)
            num_hit = len(hits) * self.kv.block_size
            num_new = min(request.num_tokens - num_hit, plan.budget, self._chunk_limit(request))
            needed = self.kv.num_needed(hits, num_hit + num_new)
            if not self._has_room(needed):
                victims = self._victims(request, hits, needed)
                if victims is None:
                    break
                for victim in victims:
                    plan.withdraw(victim)
                    self._preempt(victim)
            self.waiting.pop()
            block_ids, state = self.kv.admit(request, hits, num_new), self.kv.admit_state(request, hits)
            if request.lora is not None:
                loras.add(request.lora.version)
                if passed:
                    passed[0].num_passed += 1
            self._start(request, num_hit)
            # before `grant` counts more as computed
            plan.batch.new_requests.append(new_request(request, block_ids, state))
            plan.grant(request, num_new, prefill=True)
            # The rest of this step cannot preempt this request: a request admitted later preempts only requests that
            # are less urgent than itself. So the step fills these blocks, and later requests may share them already.
            self.kv.remember_full_blocks(request, num_hit + num_new)
        for request in reversed(passed):
            self.waiting.add_first(request)

    def _lora_may_start(self, request: Request, version: int, loras: set[int], passed: list[Request]) -> bool:
        """Whether a request with this adapter may join a batch with the adapters `loras`.

        It may pass the earlier requests `passed`, whose adapters do not fit, unless the first of these is more urgent
        (under the policy `priority`) or has been passed by `max_num_seqs` requests. In both cases no request with an
        adapter starts until a running adapter has no requests left. Requests without an adapter are not checked: they
        may pass all others.
        """
        if passed and passed[0].num_passed >= self._max_num_seqs:
            return False
        if passed and self._policy == "priority" and passed[0].priority < request.priority:
            return False
        return version in loras or len(loras) < self._max_loras

    def _has_room(self, num_blocks: int) -> bool:
        """Whether one more request may run and get `num_blocks` blocks.

        The watermark stays free, so that running requests can grow for a while before one of them is preempted. It does
        not apply if nothing runs: otherwise a large request would never start.
        """
        reserve = self._watermark_blocks if self.running else 0
        return len(self.running) < self._max_num_seqs and num_blocks + reserve <= self.kv.pool.num_free

    def _victims(self, request: Request, hits: list[Block], num_blocks: int) -> list[Request] | None:
        """Return the running requests to preempt for a more urgent waiting request, the least urgent first.

        Returns:
            None if no running request is less urgent, or if the less urgent ones hold too few blocks. Empty if the
            request fits without the watermark: a request may use it when a less urgent one runs.
        """
        if self._policy != "priority":
            return None
        victims: list[Request] = []
        least_urgent_first = sorted(self.running, key=_urgency, reverse=True)
        for candidate, num_freed in self.kv.freed_one_by_one(least_urgent_first, hits):
            if candidate.priority <= request.priority:
                return None
            if not victims and len(self.running) < self._max_num_seqs and num_blocks <= self.kv.pool.num_free:
                return []
            victims.append(candidate)
            if num_blocks <= self.kv.pool.num_free + num_freed:
                return victims
        return None

    def _start(self, request: Request, num_hit: int) -> None:
        self.queue_limits.leave(request.request_id)
        if request.status is RequestState.WAITING:
            self.stats.admitted_choice_ids.append(request.request_id)
            request.num_cached_tokens = min(num_hit, request.num_prompt_tokens)
            if self.kv.enable_prefix_caching and request.prompt_logprobs is None:
                self.stats.prefix_queried_tokens += request.num_tokens
                self.stats.prefix_hit_tokens += num_hit
        request.num_computed_tokens = num_hit
        request.status = RequestState.RUNNING
        self.running.append(request)

    # -- results of a step ----------------------------------------------------------------------------------------

    def update_from_output(
        self, batch: StepBatch, output: StepOutput, launched: Sequence[Request] | None = None
    ) -> list[EngineCoreOutput]:
        """Append the sampled tokens to their requests and return an output for each request that got one.

        Args:
            launched: the requests of the batch, if a later step was scheduled in the meantime. Some of them may have
                ended since: their results are dropped. Others may have been preempted: they get their token and keep
                waiting.
        """
        outputs: list[EngineCoreOutput] = []
        finished: set[str] = set()
        if self.kv.states is not None:
            self.kv.states.keep_planned()
        if launched is None:
            launched = [self.requests[request_id] for request_id in batch.num_scheduled_tokens]
        for request in launched:
            request_id = request.request_id
            if request.status is RequestState.FINISHED:
                continue
            if request.prompt_logprobs is not None:
                request.prompt_logprobs += output.prompt_logprobs.get(request_id, ())
            sampled = output.sampled_token_ids.get(request_id)
            if request_id in output.errors:
                entry = self._accept(request, sampled or [])
                if entry.finish_reason is None:
                    entry.finish_reason, entry.error = FinishReason.ERROR, output.errors[request_id]
            elif sampled is not None:
                if request.num_pending_tokens:
                    request.num_pending_tokens -= 1
                if self.grammars and (grammar := self.grammars.take_failed(request_id)) is not None:
                    self._release_for_grammar(request, grammar)
                    continue
                entry = self._accept_verified(request, sampled, batch, output)
            else:
                self._remember_full_blocks(request, request.num_computed_tokens)
                continue
            logprobs = output.logprobs.get(request_id)
            entry.logprobs = logprobs[: len(entry.new_token_ids)] if logprobs is not None else None
            outputs.append(entry)
            if entry.finish_reason is not None:
                finished.add(request_id)
        if finished:
            self.running = [request for request in self.running if request.request_id not in finished]
            for request_id in finished:
                request = self.requests[request_id]
                if request.status is RequestState.PREEMPTED:
                    self.waiting.remove(request)
                self._finish(request)
        return outputs

    def _release_for_grammar(self, request: Request, grammar: Grammar) -> None:
        """Drop the token that was drawn without a mask. The request leaves the scheduler to get another grammar."""
        self._remember_full_blocks(request, min(request.num_computed_tokens, request.num_tokens))
        self._suspend(request)
        if self._speculator is not None:
            self._speculator.forget(request.request_id)
        del self.requests[request.request_id]
        self._without_grammar.append((request, grammar))

    def _remember_full_blocks(self, request: Request, num_computed_tokens: int) -> None:
        if request.status is RequestState.RUNNING:  # not preempted while the step was in flight
            self.kv.remember_full_blocks(request, num_computed_tokens)

    def _accept_verified(
        self, request: Request, sampled: list[int], batch: StepBatch, output: StepOutput
    ) -> EngineCoreOutput:
        drafts = batch.draft_token_ids.get(request.request_id)
        if drafts:
            self._take_back_rejected(request, drafts, len(sampled) - 1)
        entry = self._accept(request, sampled)
        num_computed = request.num_computed_tokens
        if drafts:  # drafts after the end of the request were computed, but are not tokens of the request
            num_computed = min(num_computed, request.num_tokens)
        self._remember_full_blocks(request, num_computed)
        if self._speculator is not None and entry.finish_reason is None:
            request.draft_token_ids = self._speculator.propose(request, output)
        return entry

    def _take_back_rejected(self, request: Request, drafts: list[int], num_accepted: int) -> None:
        assert self._speculator is not None and 0 <= num_accepted <= len(drafts)
        request.num_computed_tokens -= len(drafts) - num_accepted
        self._speculator.count(self.stats, len(drafts), num_accepted)

    def _accept(self, request: Request, sampled: list[int]) -> EngineCoreOutput:
        entry = EngineCoreOutput(request.request_id, [], request.num_cached_tokens)
        if request.prompt_logprobs is not None:
            assert len(request.prompt_logprobs) == request.num_prompt_tokens - 1
            entry.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        for token_id in sampled:
            request.append_token(token_id)
            entry.new_token_ids.append(token_id)
            entry.finish_reason, entry.stop_reason = check_stop(request, self.max_model_len)
            if entry.finish_reason is not None:
                return entry
        if request.sampling_params.structured_outputs is not None:
            self.grammars.accept(request.request_id, entry.new_token_ids)
        return entry

    def _finish(self, request: Request) -> None:
        if request.status is RequestState.RUNNING:
            self._removed.append(request.request_id)
        request.status = RequestState.FINISHED
        if self._speculator is not None:
            self._speculator.forget(request.request_id)
        self.grammars.forget(request.request_id)
        self.kv.free(request)
        request.release_lora()
        del self.requests[request.request_id]

    def _describe(self, batch: StepBatch) -> None:
        stats, pool = self.stats, self.kv.pool
        stats.num_tokens = batch.num_tokens
        stats.num_requests = len(batch.num_scheduled_tokens)
        num_prefills = 0
        if stats.num_tokens > stats.num_requests:
            drafts = batch.draft_token_ids
            num_prefills = sum(count - len(drafts.get(i, ())) > 1 for i, count in batch.num_scheduled_tokens.items())
        stats.kind = "decode" if not num_prefills else "prefill" if num_prefills == stats.num_requests else "mixed"
        stats.running, stats.waiting = len(self.running), len(self.waiting)
        if self._max_loras:
            stats.lora_requests = self._count_lora_requests()
        stats.kv_blocks_total = pool.num_usable
        stats.kv_blocks_cached = pool.num_cached_free
        stats.kv_blocks_free = pool.num_free - pool.num_cached_free
        stats.kv_blocks_used = pool.num_usable - pool.num_free

    def _count_lora_requests(self) -> dict[str, list[int]]:
        counts: dict[str, list[int]] = {}
        for request in self.requests.values():
            if request.lora is not None:
                waits = request.status is not RequestState.RUNNING
                counts.setdefault(request.lora.name, [0, 0])[waits] += 1
        return counts

    def check_integrity(self, elsewhere: Iterable[str] = ()) -> None:
        """Assert the invariants of the scheduler and the pool. Cheap enough to run whenever the engine is idle.

        Args:
            elsewhere: ids of new requests that wait for a grammar or an adapter.
        """
        assert len(self.running) + len(self.waiting) == len(self.requests)
        assert len(self.running) <= self._max_num_seqs
        self.queue_limits.check_integrity(self.waiting, elsewhere)
        assert len({r.lora.version for r in self.running if r.lora is not None}) <= self._max_loras
        assert all(request.status is RequestState.RUNNING for request in self.running)
        assert all(request.status in (RequestState.WAITING, RequestState.PREEMPTED) for request in self.waiting)
        self.kv.check_integrity(self.running)


def _urgency(request: Request) -> tuple[int, float, str]:
    """Return the sort key of the waiting queue. It has no ties, so two requests cannot preempt each other for ever."""
    return request.priority, request.arrival_time, request.request_id
