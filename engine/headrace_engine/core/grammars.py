"""The grammars of requests: compiled in a thread, and applied as token masks in every step.

The state of a grammar belongs to the request. A preemption does not change it."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from headrace_engine.grammar.errors import GrammarError
from headrace_engine.grammar.grammar import Grammar, GrammarCompiler
from headrace_engine.requests.request import Request, RequestState
from headrace_engine.runner.contracts import GrammarBitmask
from headrace_engine.system.control_group import usable_cores

_MAX_THREADS = 8
# Requests per thread. For fewer requests, starting another thread costs more than it saves.
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
        self._num_threads = min(_MAX_THREADS, usable_cores())
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
            # One thread more, so that others can run while one waits for them in `_fill`.
            self._threads = ThreadPoolExecutor(self._num_threads + 1, thread_name_prefix="grammar-masks")
        return self._threads.submit(self._fill, wanted, self._threads)

    def _fill(self, wanted: list[_Row], threads: ThreadPoolExecutor) -> GrammarBitmask:
        num_parts = min(self._num_threads, -(-len(wanted) // _REQUESTS_PER_THREAD))
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
    """Remove from a mask the tokens that min_tokens forbids now, unless the mask allows no other tokens."""
    rest = bytearray(mask)
    for token_id in token_ids:
        if token_id >> 3 < len(rest):
            rest[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(rest) if any(rest) else mask


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PreparedRequest:
    request: Request
    grammar: Grammar | None
    """The grammar after the output tokens that the request arrived with. None if it failed: see `error`."""
    error: str | None = None


class GrammarPreparation:
    """Holds requests until their grammars are compiled. Only the thread of the step loop may call the methods."""

    def __init__(self, create_compiler: Callable[[], GrammarCompiler]) -> None:
        self._create_compiler = create_compiler
        self._compiler: GrammarCompiler | None = None
        self._failure: str | None = None
        self._waiting: dict[str, tuple[Request, Future[PreparedRequest]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting_ids(self) -> list[str]:
        """Return the ids of the new requests that wait."""
        return [name for name, (request, _) in self._waiting.items() if request.status is RequestState.WAITING]

    def add(self, request: Request, failed: Grammar | None = None) -> None:
        """Compile the grammar of a request. `failed` is its earlier grammar, if the request had one that failed."""
        self._waiting[request.request_id] = (request, self._thread.submit(self._prepare, request, failed))

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Remove requests that wait here and return them."""
        aborted = []
        for request_id in request_ids:
            if request_id in self._waiting:
                request, future = self._waiting.pop(request_id)
                future.cancel()
                aborted.append(request)
        return aborted

    def take(self, timeout: float) -> list[PreparedRequest]:
        """Return the ready requests in the order of arrival. Wait at most `timeout` seconds for the first one."""
        if timeout:
            wait([future for _, future in self._waiting.values()], timeout, return_when=FIRST_COMPLETED)
        ready = [request_id for request_id, (_, future) in self._waiting.items() if future.done()]
        return [self._waiting.pop(request_id)[1].result() for request_id in ready]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> None:
        """Create the compiler, for the first grammar.

        It takes 0.7 KB of memory for each token of the vocabulary, which an engine without grammars does not need.
        """
        if self._compiler is None and self._failure is None:
            try:
                self._compiler = self._create_compiler()
            except GrammarError as error:
                self._failure = f"structured_outputs: {error}"
            except Exception as error:  # noqa: BLE001  # requests without a grammar are not affected
                self._failure = f"the compiler of grammars could not be created: {type(error).__name__}: {error}"
                logger.error("%s", self._failure)

    def _prepare(self, request: Request, failed: Grammar | None = None) -> PreparedRequest:
        self._load()
        if self._compiler is None:
            return PreparedRequest(request, None, self._failure)
        params = request.sampling_params.structured_outputs
        assert params is not None
        try:
            prompt = request.token_ids[: request.num_prompt_tokens]
            output = request.token_ids[request.num_prompt_tokens :]
            grammar = self._compiler.compile(params, output, failed, prompt_token_ids=prompt)
        except GrammarError as error:
            return PreparedRequest(request, None, f"structured_outputs: {error}")
        except Exception as error:  # noqa: BLE001  # the failure concerns this request only
            name = type(error).__name__
            logger.error("a grammar could not be compiled: %s", name)  # its message may quote the grammar
            return PreparedRequest(request, None, f"the grammar of structured_outputs could not be compiled: {name}")
        return PreparedRequest(request, grammar)
