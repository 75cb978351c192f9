"""Merges the outputs that the reader of a stream has not taken yet. After vLLM's RequestOutputCollector."""

import asyncio

from headrace_engine.requests.outputs import CompletionOutput, RequestOutput
from headrace_engine.requests.sampling_params import RequestOutputKind


class OutputCollector:
    """Merges outputs until the reader takes them, so that a slow reader needs no more memory than its output.

    Deltas are joined. A cumulative output of a choice replaces the one before. Call all methods in one event loop.
    """

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self._joins = output_kind is RequestOutputKind.DELTA
        self._pending: RequestOutput | None = None
        self._texts: dict[int, list[str]] = {}
        """The pending deltas of each choice. They are joined when they are taken."""
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output. The collector may change it."""
        if self._pending is None:
            self._pending = output
            self._texts = {completion.index: [completion.text] for completion in output.outputs}
        else:
            self._merge(self._pending, output)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the stream. The reader gets the error after the pending output."""
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        """Wait for an output. Raises the error of `fail`."""
        await self._ready.wait()
        if self._pending is None:
            assert self._error is not None
            raise self._error
        output, self._pending = self._pending, None
        if self._joins:
            for completion in output.outputs:
                completion.text = "".join(self._texts[completion.index])
        if self._error is None:
            self._ready.clear()
        return output

    def _merge(self, pending: RequestOutput, output: RequestOutput) -> None:
        pending.finished = output.finished
        pending.num_cached_tokens = output.num_cached_tokens
        pending.error = output.error
        pending.metrics = output.metrics
        if output.prompt_logprobs is not None:
            pending.prompt_logprobs = output.prompt_logprobs
        places = {completion.index: place for place, completion in enumerate(pending.outputs)}
        for completion in output.outputs:
            place = places.get(completion.index)
            if place is None:
                pending.outputs.append(completion)
                self._texts[completion.index] = [completion.text]
            elif self._joins:
                self._join(pending.outputs[place], completion)
            else:
                pending.outputs[place] = completion

    def _join(self, pending: CompletionOutput, delta: CompletionOutput) -> None:
        self._texts[delta.index].append(delta.text)
        pending.token_ids += delta.token_ids
        if pending.logprobs is not None and delta.logprobs is not None:
            pending.logprobs += delta.logprobs
        pending.cumulative_logprob = delta.cumulative_logprob
        pending.finish_reason, pending.stop_reason = delta.finish_reason, delta.stop_reason
