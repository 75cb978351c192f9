"""`EngineSupervisor`: keeps one engine process alive beside the worker's event loop."""

import logging
import select
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from headrace_engine.core.outputs import EngineCoreOutputs
from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.errors import ConfigError, EngineDeadError, ModelLoadError
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.config import EngineConfig
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_factory import create_tokenizer
from headrace_engine.text.tokenizer_parts import TokenizerParts
from headrace_monitoring.logging import frames
from headrace_wire.codes import EngineDeathCause

logger = logging.getLogger(__name__)

RESTART_LIMIT = 5
"""Number of engine deaths in a row, without a finished step between them, after which the worker gives up."""
FIRST_BACK_OFF_SECONDS = 0.5
LONGEST_BACK_OFF_SECONDS = 30.0
_SHUTDOWN_SECONDS = 5.0


class EngineEvents(Protocol):
    """Receives the events of the engine. All calls come on the event loop's thread."""

    def on_engine_loading(self, share: float) -> None:
        """Takes the share of the weights that is loaded, 0 to 1."""

    def on_engine_ready(self, model_info: ModelInfo, capabilities: EngineCapabilities) -> None: ...

    def on_engine_outputs(self, outputs: EngineCoreOutputs) -> None: ...

    def on_engine_lost(self, reason: str, cause: EngineDeathCause, *, was_ready: bool) -> None: ...

    def on_engine_given_up(self, reason: str) -> None: ...


class EngineSupervisor:
    """Starts the engine process, reads its outputs on the event loop, and restarts it when it dies.

    A model or an option that can never work is not retried. The receiver of the events keeps the requests, and sends
    them again in `on_engine_ready`.

    Args:
        stall_seconds: an engine that has work and sends nothing for this long is killed.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        events: EngineEvents,
        spawn: Callable[[EngineConfig], EngineCoreProcess] = EngineCoreProcess,
        *,
        stall_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._events = events
        self._spawn = spawn
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._progress_at = clock()
        self._process: EngineCoreProcess | None = None
        self._hub: Any = None
        self._tokenizer: ModelTokenizer | None = None
        self.tokenizer_parts: TokenizerParts
        """The parts that `tokenizer` was made of. Set when the first engine is ready."""
        self._tokenizer_answer: Future[Any] = Future()
        """Only the engine process reads the tokenizer files, because that may need torch. It is asked once."""
        self._deaths_in_a_row = 0
        self._started_at = 0.0
        self.is_ready = False
        self._stopped = False
        self._restart_at: float | None = None
        """Time by `clock` at which the next process starts after a death."""
        self._restart_timer: Any = None

    @property
    def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer. An engine must be or have been ready."""
        assert self._tokenizer is not None, "no engine was ready yet"
        return self._tokenizer

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start a process. Call it on the main thread: the process dies with the thread that starts it."""
        self._started_at = time.monotonic()
        self._process = self._spawn(self._config)
        if self._tokenizer is None:
            self._tokenizer_answer = self._process.call("tokenizer")
        logger.info("engine process %d is loading %s", self._process.pid, self._config.model.model)
        if self._hub is not None:
            self.attach(self._hub)

    def attach(self, hub: Any) -> None:
        """Read from the engine in this event loop; called again after each reconnect, which clears the loop."""
        self._hub = hub
        if self._process is not None:
            hub.add_reader(self._process.fileno(), self._on_readable)
        elif self._restart_at is not None:
            self._await_restart()  # Celery cancels timers that were set while it tried to connect

    def send(self, requests: Iterable[EngineCoreRequest | PoolingCoreRequest]) -> None:
        """Send requests to the engine if it is ready. Otherwise `on_engine_ready` sends all unfinished requests."""
        if not self.is_ready or self._process is None:
            return
        try:
            for request in requests:
                self._process.add_request(request)
        except EngineDeadError:
            logger.warning("a request could not be sent: the engine has died")

    def abort(self, request_ids: Sequence[str]) -> None:
        if self.is_ready and self._process is not None and request_ids:
            try:
                self._process.abort_requests(request_ids)
            except EngineDeadError:
                logger.warning("an abort could not be sent: the engine has died")

    def check_progress(self, *, has_work: bool) -> None:
        """Kill an engine that hangs, and restart it as after a death. Call it about once a second."""
        now = self._clock()
        if not self.is_ready or not has_work:
            self._progress_at = now
        elif now - self._progress_at > self._stall_seconds:
            self.pump(0.0)  # perhaps this process itself was stopped, and outputs of the engine are unread
            process = self._process
            if self.is_ready and process is not None and now - self._progress_at > self._stall_seconds:
                self._reap(process)
                reason = f"it had work and made no step for {now - self._progress_at:.0f} s"
                self._on_death(reason, "stall", was_ready=True)

    def reset_deaths(self) -> None:
        """Reset the number of deaths in a row, because a request caused the last one."""
        self._deaths_in_a_row = 0

    def pump(self, seconds: float) -> None:
        """Read from the engine for `seconds` while no event loop runs."""
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            readable = [self._process.fileno()] if self._process is not None else []
            if not select.select(readable, [], [], left)[0]:
                return
            self._on_readable()

    def stop(self) -> None:
        """End the engine process for good."""
        process, was_ready = self._process, self.is_ready
        self._stopped, self.is_ready, self._process = True, False, None
        if process is None:
            return
        self._forget_reader(process)
        if was_ready:
            process.shutdown(_SHUTDOWN_SECONDS)
        else:
            process.kill()  # it would read a shutdown frame only once the model is loaded
        process.close()

    def _on_readable(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            steps = process.receive()
            self._progress_at = self._clock()
            self._announce(process, steps)
        except (ConfigError, ModelLoadError) as error:
            self._reap(process)
            self._give_up(str(error))
        except EngineDeadError as error:
            was_ready = self.is_ready
            self._reap(process)
            self._on_death(error.summary, error.cause, was_ready=was_ready)
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Give up on the engine, because its outputs could not be handled.

        Some tokens are lost, so continuing would leave a gap in a stream. Another worker, or the next start of this
        one, resumes every request from its published tokens.
        """
        logger.error("outputs of the engine could not be handled: %s", frames(error))
        if self._process is not None:
            self._reap(self._process)
        self._give_up(f"outputs of the engine could not be handled: {type(error).__name__}")

    def _announce(self, process: EngineCoreProcess, steps: Iterable[EngineCoreOutputs]) -> None:
        if not process.is_ready:
            self._events.on_engine_loading(process.load_progress)
        elif not self.is_ready and self._has_tokenizer():
            self.is_ready = True
            engine = f"{self._config.engine} {process.capabilities.version}".rstrip()
            logger.info("engine ready after %.1f s: %s", time.monotonic() - self._started_at, engine)
            self._events.on_engine_ready(process.model_info, process.capabilities)
        for step in steps:
            self._deaths_in_a_row = 0
            self._events.on_engine_outputs(step)

    def _has_tokenizer(self) -> bool:
        if self._tokenizer is None and self._tokenizer_answer.done():
            parts, self._tokenizer_answer = TokenizerParts(**self._tokenizer_answer.result()), Future()
            model = self._config.model
            self.tokenizer_parts = parts
            self._tokenizer = create_tokenizer(model.model, parts, trust_remote_code=model.trust_remote_code)
        return self._tokenizer is not None

    def _on_death(self, reason: str, cause: EngineDeathCause, *, was_ready: bool) -> None:
        if self._stopped:
            return
        self._deaths_in_a_row += 1
        logger.error("engine lost (%d in a row): %s", self._deaths_in_a_row, reason)
        self._events.on_engine_lost(reason, cause, was_ready=was_ready)
        if self._deaths_in_a_row >= RESTART_LIMIT:
            self._give_up(f"the engine died {self._deaths_in_a_row} times in a row: {reason}")
            return
        delay = min(FIRST_BACK_OFF_SECONDS * 2 ** max(self._deaths_in_a_row - 1, 0), LONGEST_BACK_OFF_SECONDS)
        self._restart_at = self._clock() + delay
        self._await_restart()

    def _await_restart(self) -> None:
        assert self._restart_at is not None
        if self._restart_timer is not None:
            self._restart_timer.cancel()
        self._restart_timer = self._hub.call_later(max(0.0, self._restart_at - self._clock()), self._restart)

    def _restart(self) -> None:
        if self._stopped:
            return
        try:
            self.start()
        except ConfigError as error:
            self._give_up(str(error))
        except (EngineDeadError, OSError) as error:  # no memory or no file descriptor for a process at present
            self._on_death(f"the engine process could not be started: {error}", "crash", was_ready=False)

    def _reap(self, process: EngineCoreProcess) -> None:
        self.is_ready = False
        self._process = None
        self._forget_reader(process)
        process.kill()
        process.close()

    def _forget_reader(self, process: EngineCoreProcess) -> None:
        if self._hub is not None:
            self._hub.remove(process.fileno())

    def _give_up(self, reason: str) -> None:
        self._stopped = True
        logger.critical("gave up on the engine: %s", reason)
        self._events.on_engine_given_up(reason)
