"""The grammars of the requests in the scheduler, and the token masks of a step.

The state of a grammar belongs to the request. A preemption does not change it.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from headrace_engine.grammar import Grammar
from headrace_engine.grammar_errors import GrammarError
from headrace_engine.request import Request
from headrace_engine.runner.contracts import GrammarBitmask

_MAX_THREADS = 8
# A thread is worth its start only for this many requests.
_REQUESTS_PER_THREAD = 8


@dataclass(slots=True)
class _State:
    grammar: Grammar
    failed: bool = False
    """There is no mask, so the token that the step draws for the request is void."""


_Row = tuple[_State, Request, Sequence[int]]


class GrammarStates:
    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        self._threads: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._states)

    def add(self, request_id: str, grammar: Grammar) -> None:
        self._states[request_id] = _State(grammar)

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def take_failed(self, request_id: str) -> Grammar | None:
        """Remove and return the grammar of a request if it has failed. Otherwise return None."""
        state = self._states.get(request_id)
        if state is None or not state.failed:
            return None
        return self._states.pop(request_id).grammar

    def bitmask(self, drafts: Sequence[tuple[Request, Sequence[int]]]) -> "Future[GrammarBitmask] | None":
        """Start to compute the masks of a step, in parallel with the model.

        Args:
            drafts: the requests that get a token in this step, with their draft tokens.

        Returns:
            None if no request has a grammar.
        """
        wanted = [(self._states[r.request_id], r, d) for r, d in drafts if r.request_id in self._states]
        if not wanted:
            return None
        if self._threads is None:
            count = min(_MAX_THREADS, os.cpu_count() or 1)
            # One more, because the first thread waits for the others.
            self._threads = ThreadPoolExecutor(count + 1, thread_name_prefix="grammar-masks")
        return self._threads.submit(self._fill, wanted, self._threads)

    def _fill(self, wanted: list[_Row], threads: ThreadPoolExecutor) -> GrammarBitmask:
        num_parts = min(_MAX_THREADS, os.cpu_count() or 1, -(-len(wanted) // _REQUESTS_PER_THREAD))
        others = [threads.submit(_masks_of, wanted[part::num_parts]) for part in range(1, num_parts)]
        masks = _masks_of(wanted[::num_parts])
        for other in others:
            masks |= other.result()
        return GrammarBitmask(masks=masks)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Advance the grammar of a request by its new tokens."""
        state = self._states.get(request_id)
        if state is not None:
            try:
                state.grammar.accept(token_ids)
            except GrammarError:
                state.failed = True


def _masks_of(wanted: list[_Row]) -> dict[str, list[bytes]]:
    masks = {}
    for state, request, draft_token_ids in wanted:
        try:
            rows = state.grammar.bitmasks(draft_token_ids)
        except GrammarError:
            state.failed = True
            continue
        missing = request.sampling_params.min_tokens - request.num_output_tokens
        for index in range(min(missing, len(rows))):
            rows[index] = _without(rows[index], request.eos_token_ids | request.stop_token_ids)
        masks[request.request_id] = rows
    return masks


def _without(mask: bytes, token_ids: frozenset[int]) -> bytes:
    """Remove the tokens that must not come before min_tokens, unless the mask allows nothing else."""
    rest = bytearray(mask)
    for token_id in token_ids:
        if token_id >> 3 < len(rest):
            rest[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(rest) if any(rest) else mask
