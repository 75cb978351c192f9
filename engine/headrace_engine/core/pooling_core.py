"""`PoolingCore`: the step loop of a model that computes one row of numbers for each input.

A step takes whole inputs of all requests, and sends the rows of each request in the order of its inputs. There is no KV
cache, no sampler and no preemption. Imports no torch.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from headrace_engine.core.outputs import EngineCoreOutputs, PooledRows, StepStats
from headrace_engine.core.pooling_queue import PoolingQueue
from headrace_engine.core.tokenizer_source import TokenizerSource
from headrace_engine.errors import InvalidRequestError
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.config import EngineConfig
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_engine.runner.contracts import PoolingBatch, PoolingRunner

_TOKENIZER = "headrace_engine.text.pooling_tokenizer:load_pooling_tokenizer"
_STATS = ("step_seconds", "kind", "num_tokens", "num_requests", "running")


class PoolingCore:
    """The queue and the runner of one model. Implements `serving.Core`.

    Raises:
        ModelLoadError: the model cannot be loaded.
        ConfigError: an option does not fit a pooling model.
    """

    def __init__(self, config: EngineConfig, runner: PoolingRunner) -> None:
        self.runner = runner
        self.model_info = runner.load_model()
        assert self.model_info.pooling is not None
        self._info = self.model_info.pooling
        self.wake: Callable[[], None] = lambda: None
        self._budget = self._info.max_step_tokens
        self._tokenizer = TokenizerSource(replace(config, tokenizer=_TOKENIZER), self.model_info)
        self._queue = PoolingQueue()
        self._requests: dict[str, PoolingCoreRequest] = {}
        self._refused: list[PooledRows] = []

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(priority=True, stats=_STATS)

    def add_request(self, message: Any) -> None:
        """Queue a `PoolingCoreRequest`. If it is refused, the next step returns its error."""
        if not isinstance(message, PoolingCoreRequest):
            error = f"the model computes {self._tasks}; it does not generate"
            self._refused.append(PooledRows(message.request_id, 0, 0, b"", True, error))
            return
        problem = self._problem(message)
        if problem is not None:
            self._refused.append(PooledRows(message.request_id, message.first, 0, b"", True, problem))
            return
        self._requests[message.request_id] = message
        self._queue.add(message.request_id, [*map(len, message.inputs)], message.priority, message.tenant)

    def _problem(self, message: PoolingCoreRequest) -> str | None:
        if message.task not in self._info.tasks:
            return f"the model computes {self._tasks}, not {message.task}"
        if message.request_id in self._requests:
            return f"request {message.request_id} is unfinished"
        if not message.inputs:
            return "the request has no inputs"
        for index, tokens in enumerate(message.inputs, message.first):
            if not message.num_prompt_tokens < len(tokens) <= self._info.max_input_tokens:
                limits = f"{message.num_prompt_tokens + 1} to {self._info.max_input_tokens}"
                return f"input[{index}] has {len(tokens)} tokens, the model takes {limits}"
        return None

    @property
    def _tasks(self) -> str:
        return " and ".join(self._info.tasks)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._queue.remove(request_ids)
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._requests or self._refused)

    def step(self) -> EngineCoreOutputs:
        started = time.perf_counter()
        rows, self._refused = self._refused, []
        taken: dict[str, list[int]] = {}
        for request_id, index in self._queue.take(self._budget):
            taken.setdefault(request_id, []).append(index)
        batch = PoolingBatch(requests=[(self._requests[name], indices) for name, indices in taken.items()])
        if taken:
            computed = iter(self.runner.compute(batch))
            rows += [self._take_in(*each, [next(computed) for _ in each[1]]) for each in batch.requests]
        return EngineCoreOutputs(
            outputs=[],
            stats=StepStats(
                step_seconds=time.perf_counter() - started,
                kind="prefill",
                num_tokens=batch.num_tokens,
                num_requests=len(taken),
                running=len(self._requests),
            ),
            rows=rows,
        )

    def _take_in(self, request: PoolingCoreRequest, indices: list[int], rows: list[bytes | None]) -> PooledRows:
        first = request.first + indices[0]
        if None in rows:
            self.abort_requests([request.request_id])
            what = "embedding" if request.task == "embed" else "score"
            error = f"input[{first + rows.index(None)}] has no finite {what}"
            return PooledRows(request.request_id, first, 0, b"", True, error)
        is_last = indices[-1] == len(request.inputs) - 1
        if is_last:
            del self._requests[request.request_id]
        return PooledRows(request.request_id, first, len(rows), b"".join(row for row in rows if row), is_last)

    def call(self, method: str, *_: Any) -> "Future[Any]":
        """Run `tokenizer`, which returns the model's `TokenizerParts`. Other methods are refused."""
        if method == "tokenizer":
            return self._tokenizer.describe()
        refused: Future[Any] = Future()
        refused.set_exception(InvalidRequestError(f"a model that does not generate has no {method}"))
        return refused

    def check_integrity(self) -> None:
        assert not self._requests and not len(self._queue) and not self._queue.num_tokens, "state of a request is left"

    def shutdown(self) -> None:
        self.runner.shutdown()
