"""Compiles the grammars of requests in a thread, while the step loop serves other requests.

It does so for new requests, and for running ones whose grammar failed.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from headrace_engine.grammar import Grammar, GrammarCompiler
from headrace_engine.grammar_errors import GrammarError
from headrace_engine.request import Request, RequestStatus

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PreparedRequest:
    request: Request
    grammar: Grammar | None
    """Advanced by the output that the request came with. None if it failed, see `error`."""
    error: str | None = None


class GrammarPreparation:
    """Holds requests until their grammars are compiled. Belongs to the thread of the step loop."""

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
        return [name for name, (request, _) in self._waiting.items() if request.status is RequestStatus.WAITING]

    @property
    def is_loaded(self) -> bool:
        """Whether the compiler has been created, or has failed to be."""
        return self._compiler is not None or self._failure is not None

    def load(self) -> None:
        """Create the compiler, once. It reads the whole vocabulary and blocks all threads for up to a second.

        Call it when the engine is idle, so that the first request with a grammar does not stall the others.
        """
        if not self.is_loaded:
            try:
                self._compiler = self._create_compiler()
            except Exception as error:  # noqa: BLE001  # requests without a grammar are not affected
                self._failure = f"structured_outputs: {error}"

    def add(self, request: Request, failed: Grammar | None = None) -> None:
        """Compile the grammar of a request. `failed` is the one to replace, if it had one."""
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
        """Return the requests that are ready, by arrival. Wait at most `timeout` seconds for the first one."""
        if timeout:
            wait([future for _, future in self._waiting.values()], timeout, return_when=FIRST_COMPLETED)
        ready = [request_id for request_id, (_, future) in self._waiting.items() if future.done()]
        return [self._waiting.pop(request_id)[1].result() for request_id in ready]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, request: Request, failed: Grammar | None = None) -> PreparedRequest:
        self.load()
        if self._compiler is None:
            return PreparedRequest(request, None, self._failure)
        params = request.sampling_params.structured_outputs
        assert params is not None
        try:
            output_token_ids = request.token_ids[request.num_prompt_tokens :]
            grammar = self._compiler.compile(params, output_token_ids, failed)
        except GrammarError as error:
            return PreparedRequest(request, None, f"structured_outputs: {error}")
        except Exception as error:  # noqa: BLE001  # the failure concerns this request only
            name = type(error).__name__
            logger.error("a grammar could not be compiled: %s", name)  # its message may quote the grammar
            return PreparedRequest(request, None, f"structured_outputs: the grammar could not be compiled: {name}")
        return PreparedRequest(request, grammar)
