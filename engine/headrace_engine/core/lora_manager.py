"""Keeps track of the loaded LoRA adapters, of the requests that use them, and of the requests that wait for one.

    request --take--> parked --ready--> scheduler          a thread loads adapters while steps are computed;
                       |  ^                               only requests that need them wait
                       v  | loaded, or room has been made
                     loader thread --load_lora--> runner

Each load of an adapter has a version, and a request keeps the version that it started with. So the removal or
replacement of an adapter takes effect at once for later requests. The memory of the old version is freed when its last
request ends. Imports no torch.
"""

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from headrace_engine.errors import ConfigError, LoRACapacityError, LoRAError
from headrace_engine.options.config import LoRAConfig
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.request import EngineCoreRequest, LoRAVersion
from headrace_engine.runner.contracts import AdapterLoader

logger = logging.getLogger(__name__)


class LoadedLoRA(LoRAVersion):
    """One version of an adapter in the runner's memory."""

    __slots__ = ("_manager", "is_pinned", "is_retired", "last_used", "num_users", "request")

    def __init__(self, manager: "LoRAManager", request: LoRARequest, version: int) -> None:
        super().__init__(request.lora_name, version)
        self._manager = manager
        self.request = request
        self.num_users = 0
        self.last_used = version
        self.is_pinned = False
        self.is_retired = False
        """Removed or replaced: new requests do not get it."""

    def release(self) -> None:
        self._manager.release(self)


class LoRAManager:
    """Owns the loaded adapters and the requests that are parked until their adapter is ready.

    `call` and the methods with vLLM's names (`_CALLS`) may be called from any thread, the others only from the step
    loop.

    Args:
        wake: called, from any thread, when a parked request can continue, as the step loop may sleep.
    """

    def __init__(self, config: LoRAConfig, runner: AdapterLoader, wake: Callable[[], None]) -> None:
        self._max_loaded = config.max_cpu_loras
        self._runner = runner
        self._wake = wake
        self._lock = threading.RLock()
        self._loras: dict[int, LoadedLoRA] = {}
        self._retired: set[LoadedLoRA] = set()
        self._clock = itertools.count(1)
        """Numbers both the versions and the uses of adapters."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lora")
        self._parked: list[EngineCoreRequest] = []
        self._loading: tuple[int, Future[bool]] | None = None
        self._may_be_ready = False

    @classmethod
    def create(cls, config: LoRAConfig | None, runner: AdapterLoader, wake: Callable[[], None]) -> "LoRAManager | None":
        """Return a manager with the preloaded adapters, or None if adapters are not enabled.

        Raises:
            ConfigError: an adapter to preload cannot be served.
        """
        if config is None:
            return None
        manager = cls(config, runner, wake)
        manager.preload(config.preload)
        return manager

    def preload(self, requests: Iterable[LoRARequest]) -> None:
        """Load the adapters that the engine starts with. Raises ConfigError if one cannot be served."""
        try:
            for request in requests:
                self.add_lora(request)
        except LoRAError as error:
            raise ConfigError(str(error)) from error

    # -- adapters -------------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any) -> "Future[Any]":
        """Run one of the methods below in the loader thread, in the order of the calls."""
        return self._executor.submit(_CALLS[method], self, *args)

    def add_lora(self, request: LoRARequest) -> bool:
        """Load an adapter. Keep a loaded one unless `load_inplace` is set. Blocks while the adapter is read.

        Raises:
            LoRAError: the adapter cannot be served.
            LoRACapacityError: there is no room for the adapter now.
        """
        with self._lock:
            known = self._loras.get(request.lora_int_id)
            if known is not None and not request.load_inplace:
                _check_same(known, request)
                return True
            if not request.lora_path:
                raise LoRAError(
                    f"LoRA adapter {request.lora_name!r} is not loaded, and lora_path does not say where it is"
                )
            if known is None and not self._has_room():
                raise self._no_room(request)
            version = next(self._clock)
        self._runner.load_lora(version, request)
        with self._lock:
            if known is None and not self._make_room():  # after the load: an unreadable adapter evicts none
                self._runner.unload_lora(version)
                raise self._no_room(request)
            lora = self._loras[request.lora_int_id] = LoadedLoRA(self, request, version)
            if known is not None:
                lora.is_pinned = known.is_pinned
                self._retire(known)
        logger.info("LoRA adapter %s is loaded (version %d)", request.lora_name, version)
        return True

    def _no_room(self, request: LoRARequest) -> LoRACapacityError:
        return LoRACapacityError(
            f"LoRA adapter {request.lora_name!r} has no room: {self._max_loaded} adapters (max_cpu_loras) are loaded, "
            "and each is pinned or in use"
        )

    def remove_lora(self, lora_int_id: int) -> bool:
        """Remove an adapter. Requests that use it keep it to their end. Return False if it was not loaded."""
        with self._lock:
            lora = self._loras.pop(lora_int_id, None)
            if lora is not None:
                self._retire(lora)
        return lora is not None

    def list_loras(self) -> list[int]:
        with self._lock:
            return sorted(self._loras)

    def pin_lora(self, lora_int_id: int) -> bool:
        """Never evict this adapter. Return False if it is not loaded."""
        with self._lock:
            lora = self._loras.get(lora_int_id)
            if lora is not None:
                lora.is_pinned = True
        return lora is not None

    def release(self, lora: LoadedLoRA) -> None:
        """Record that a request that used this version has ended."""
        with self._lock:
            lora.num_users -= 1
            assert lora.num_users >= 0, f"{lora.name} is released more often than it was acquired"
            if lora.num_users == 0:
                if lora.is_retired:
                    self._unload(lora)
                self._tell()

    def _acquire(self, request: LoRARequest) -> LoadedLoRA | None:
        with self._lock:
            lora = self._loras.get(request.lora_int_id)
            if lora is not None:
                _check_same(lora, request)
                lora.num_users += 1
                lora.last_used = next(self._clock)
            return lora

    def _retire(self, lora: LoadedLoRA) -> None:
        lora.is_retired = True
        self._retired.add(lora)
        if lora.num_users == 0:
            self._unload(lora)
            self._tell()

    def _unload(self, lora: LoadedLoRA) -> None:
        self._retired.discard(lora)
        self._runner.unload_lora(lora.version)

    def _evictable(self) -> list[LoadedLoRA]:
        return [lora for lora in self._loras.values() if not lora.num_users and not lora.is_pinned]

    def _has_room(self) -> bool:
        with self._lock:
            return len(self._loras) + len(self._retired) < self._max_loaded or bool(self._evictable())

    def _make_room(self) -> bool:
        """Evict the least recently used idle adapter if there is no room for one more. Return False if none is idle."""
        if not self._has_room():
            return False
        if len(self._loras) + len(self._retired) >= self._max_loaded:
            oldest = min(self._evictable(), key=lambda lora: lora.last_used)
            del self._loras[oldest.request.lora_int_id]
            self._unload(oldest)
        return True

    # -- requests that wait for an adapter ------------------------------------------------------------------------

    def take(self, message: EngineCoreRequest) -> LoadedLoRA | None:
        """Return the adapter of a request if it is loaded. Otherwise park the request until `ready` returns it."""
        assert message.lora_request is not None
        if not self._parked:
            with contextlib.suppress(LoRAError):  # `ready` reports the error
                lora = self._acquire(message.lora_request)
                if lora is not None:
                    return lora
        self._parked.append(message)
        self._may_be_ready = True
        return None

    def abort(self, request_ids: Iterable[str]) -> None:
        gone = set(request_ids)
        left = [message for message in self._parked if message.request_id not in gone]
        if len(left) < len(self._parked):
            self._parked = left
            self._may_be_ready = bool(left)  # the aborted requests may have held up later ones

    def waiting_ids(self) -> list[str]:
        return [message.request_id for message in self._parked]

    @property
    def may_be_ready(self) -> bool:
        """Whether `ready` may return a request."""
        return self._may_be_ready

    def ready(self) -> list[tuple[EngineCoreRequest, LoadedLoRA | str]]:
        """Return the requests that need not wait any more, each with its adapter or with the reason of its refusal.

        While a request waits for room, no request behind it gets an adapter, not even a loaded one. Otherwise new
        requests could keep all loaded adapters in use for ever. While an adapter is being read, the requests behind it
        continue.
        """
        self._may_be_ready = False
        failed = self._finish_loading()
        results: list[tuple[EngineCoreRequest, LoadedLoRA | str]] = []
        still_parked = []
        room_wanted = False
        for message in self._parked:
            result = None if room_wanted else self._try(message, failed)
            if result is not None:
                results.append((message, result))
            else:
                still_parked.append(message)
                room_wanted = room_wanted or self._loading is None
        self._parked = still_parked
        return results

    def _try(self, message: EngineCoreRequest, failed: dict[int, str]) -> LoadedLoRA | str | None:
        request = message.lora_request
        assert request is not None
        if request.lora_int_id in failed:
            return failed[request.lora_int_id]
        try:
            lora = self._acquire(request)
        except LoRAError as error:
            return str(error)
        if lora is not None or self._loading is not None:
            return lora
        if self._has_room() or self._all_pinned():  # if all are pinned, `add_lora` raises the error
            future = self._executor.submit(self.add_lora, request)
            self._loading = request.lora_int_id, future
            future.add_done_callback(lambda _: self._tell())
        return None

    def _all_pinned(self) -> bool:
        with self._lock:
            return sum(lora.is_pinned for lora in self._loras.values()) >= self._max_loaded

    def _finish_loading(self) -> dict[int, str]:
        if self._loading is None or not self._loading[1].done():
            return {}
        (lora_int_id, future), self._loading = self._loading, None
        error = future.exception()
        if error is None or (isinstance(error, LoRACapacityError) and not self._all_pinned()):
            return {}  # a request took the adapter to evict: wait for another one
        if not isinstance(error, LoRAError):
            logger.error("a LoRA adapter could not be loaded", exc_info=error)
        return {lora_int_id: str(error) if isinstance(error, LoRAError) else f"{type(error).__name__}: {error}"}

    def _tell(self) -> None:
        if self._parked:
            self._may_be_ready = True
            self._wake()

    def check_integrity(self) -> None:
        """Assert that an idle engine's adapters have no users."""
        with self._lock:
            assert not self._retired and all(lora.num_users == 0 for lora in self._loras.values())

    def shutdown(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _check_same(known: LoadedLoRA, request: LoRARequest) -> None:
    if known.name != request.lora_name:
        raise LoRAError(f"the LoRA id {request.lora_int_id} is {known.name!r}'s, not {request.lora_name!r}'s")
    if request.lora_path and request.lora_path != known.request.lora_path:
        raise LoRAError(
            f"LoRA adapter {known.name!r} is loaded from another folder: remove it first, or add it with load_inplace"
        )


def _add(manager: LoRAManager, wire: dict[str, Any]) -> bool:
    return manager.add_lora(LoRARequest.from_wire(wire))


_CALLS: dict[str, Callable[..., Any]] = {
    "add_lora": _add,
    "remove_lora": LoRAManager.remove_lora,
    "list_loras": LoRAManager.list_loras,
    "pin_lora": LoRAManager.pin_lora,
}
