"""Calls the operator's logits processors: one function for each request. Its failure affects no other request."""

import logging
from collections.abc import Callable, Sequence

import torch

from headrace_engine.errors import raised_at
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.logits_processor import LogitsProcessor, load_logits_processors, with_prompt
from headrace_engine.requests.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Process = Callable[[Sequence[int], Sequence[int], torch.Tensor], torch.Tensor]


class RequestProcessors:
    """All processors of one request, in order.

    An exception fails only this request: its row of logits then allows no token.
    """

    def __init__(self, processes: Sequence[tuple[str, Process]]) -> None:
        self._processes = processes
        self.failure: str | None = None
        """Why the last call failed."""

    def __call__(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], logits: torch.Tensor
    ) -> torch.Tensor:
        for name, process in self._processes:
            try:
                processed = process(prompt_token_ids, output_token_ids, logits)
                if not isinstance(processed, torch.Tensor) or processed.shape != logits.shape:
                    raise TypeError(f"returned {_describe(processed)}, expected logits of shape {tuple(logits.shape)}")
            except Exception as error:  # noqa: BLE001  # the operator's code may raise anything
                self.failure = f"logits processor {name} failed: {type(error).__name__}: {error}"
                _log_failure(name, error)
                return torch.full_like(logits, float("-inf"))
            logits = processed
        return logits


class ProcessorSet:
    """The instances of all processors, for the lifetime of the model."""

    def __init__(self, config: EngineConfig) -> None:
        classes = load_logits_processors(config.model.logits_processors)
        self._processors: list[LogitsProcessor] = [made(config) for made in classes]

    def for_request(self, params: SamplingParams) -> RequestProcessors | None:
        """Return the processors of a request, or None if no processor applies to it."""
        wanted: list[tuple[str, Process]] = []
        for processor in self._processors:
            name = type(processor).__name__
            try:
                process = processor.new_req_logits_processor(params)
            except Exception as error:  # noqa: BLE001  # as above
                wanted.append((name, _raising(error)))
            else:
                if process is not None:
                    wanted.append((name, with_prompt(process)))
        return RequestProcessors(wanted) if wanted else None


def _raising(error: Exception) -> Process:
    def process(*_: object) -> torch.Tensor:
        raise error

    return process


def _log_failure(name: str, error: Exception) -> None:
    """Log where a processor failed. Omit the message of the error, which may quote the text of a user."""
    logger.error("logits processor %s failed at\n%s", name, raised_at(error))


def _describe(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
