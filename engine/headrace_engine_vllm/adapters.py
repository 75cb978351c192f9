"""LoRA adapters in vLLM. Headrace's `LoRAManager` decides which adapters are loaded, and counts their users.

vLLM reads an adapter between two steps, in the thread that computes steps. Its runner v2 keeps adapter ids in 32 bits.
Headrace's ids have 48 bits, so each adapter gets a small number here.
"""

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest as VLLMLoRARequest

from headrace_engine.errors import LoRAError
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine_vllm.errors import sentence_of


class LoadedAdapters:
    """The adapters that vLLM has loaded, by the version that `LoRAManager` gave them.

    Args:
        client: vLLM's `InprocClient`.
        wake: called from any thread when there is a task to run between two steps.
    """

    def __init__(self, client: Any, wake: Callable[[], None]) -> None:
        self._client = client
        self._wake = wake
        self._loaded: dict[int, VLLMLoRARequest] = {}
        self._ids = itertools.count(1)
        self._stepping_thread = threading.get_ident()
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()

    def load_lora(self, version: int, request: LoRARequest) -> None:
        """Load an adapter. Blocks until it is read. Raises LoRAError."""
        if not Path(request.lora_path).is_dir():  # vLLM would look for it on the hub
            raise LoRAError(f"LoRA adapter {request.lora_name!r} is in {request.lora_path!r}, which is not a folder")
        wanted = VLLMLoRARequest(request.lora_name, next(self._ids), request.lora_path)

        def load() -> None:
            try:
                self._client.add_lora(wanted)
            except Exception as error:
                name = request.lora_name
                raise LoRAError(f"vLLM cannot load LoRA adapter {name!r}: {sentence_of(error)}") from error
            self._loaded[version] = wanted

        self._between_steps(load).result()

    def unload_lora(self, version: int) -> None:
        """Unload an adapter before the next step. Call it from any thread."""
        self._between_steps(lambda: self._client.remove_lora(self._loaded.pop(version).lora_int_id))

    def _between_steps(self, task: Callable[[], None]) -> "Future[None]":
        done: Future[None] = Future()
        self._tasks.put((task, done))
        if threading.get_ident() == self._stepping_thread:
            self.run_tasks()
        else:
            self._wake()
        return done

    @property
    def has_tasks(self) -> bool:
        return not self._tasks.empty()

    def run_tasks(self) -> None:
        """Load and unload adapters. Call it in the thread that computes steps."""
        while not self._tasks.empty():
            task, done = self._tasks.get()
            try:
                task()
            except Exception as error:  # noqa: BLE001  # the caller gets it
                done.set_exception(error)
            else:
                done.set_result(None)

    def of(self, version: int) -> VLLMLoRARequest:
        """Return vLLM's description of a loaded adapter, for a request."""
        return self._loaded[version]
