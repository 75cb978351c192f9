"""An engine in its child process, driven request by request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_engine.core.outputs import EngineCoreOutput, StepStats
from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest, FinishReason
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.contracts import TokenLogprobs

READY_SECONDS = 300.0


@dataclass
class Case:
    """What is asked, and the tokens of an earlier attempt."""

    prompt: list[int]
    params: SamplingParams
    seed: int = 77
    emitted: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None

    def take(self, output: EngineCoreOutput) -> None:
        self.tokens += output.new_token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error

    @property
    def end(self) -> tuple[FinishReason | None, int | str | None]:
        return self.finish_reason, self.stop_reason


class DrivenEngine:
    """Numbers the requests, so that one engine serves many tests."""

    def __init__(self, **options: Any) -> None:
        self.process = EngineCoreProcess(EngineArgs(**options).create_engine_config())
        self._numbers = itertools.count()
        self.stats: list[StepStats] = []
        """Of all steps of the last `run`."""
        try:
            self.info = self.process.wait_ready(READY_SECONDS)
        except BaseException:
            self.close()
            raise

    def add(self, case: Case) -> str:
        request_id = str(next(self._numbers))
        self.process.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=case.prompt,
                sampling_params=case.params,
                seed=case.seed,
                eos_token_ids=self.info.eos_token_ids,
                output_token_ids=case.emitted,
                bad_words_token_ids=case.bad_words,
                **case.options,
            )
        )
        return request_id

    def run(self, cases: Sequence[Case]) -> list[Answer]:
        answers = {self.add(case): Answer() for case in cases}
        self.stats = []
        while any(answer.finish_reason is None for answer in answers.values()):
            step = self.process.get_outputs()
            assert step is not None
            self.stats.append(step.stats)
            for output in step.outputs:
                if output.request_id in answers:  # else an aborted one's, sent before
                    answers[output.request_id].take(output)
        return list(answers.values())

    def call(self, method: str, *args: Any) -> Any:
        answer = self.process.call(method, *args)
        self.process.wait(answer)
        return answer.result()

    def close(self) -> None:
        self.process.shutdown()
        self.process.close()
