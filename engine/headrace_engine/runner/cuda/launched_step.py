"""Launched steps: `PendingStep` if the tokens are still on the device, `CompleteStep` if the host has them."""

import time

from headrace_engine.runner.batch import ExpectedToken
from headrace_engine.runner.contracts import StepOutput
from headrace_engine.runner.cuda.sampling import DrawnAhead


class CompleteStep:
    """Implements `LaunchedStep` for a step whose results are known."""

    is_complete = True

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class PendingStep:
    """Implements `LaunchedStep` for a step whose tokens were drawn on the device. `result` passes them to the requests.

    Args:
        expected: the expected token of each row of `drawn`.
        output: the output of the step without its tokens.
    """

    is_complete = False

    def __init__(self, drawn: DrawnAhead, expected: list[ExpectedToken], output: StepOutput) -> None:
        self._drawn: DrawnAhead | None = drawn
        self._expected = expected
        self._output = output
        self.has_arrived = False

    def result(self) -> StepOutput:
        """Wait for the tokens. Later calls return the same output."""
        if self.has_arrived:
            return self._output
        started = time.perf_counter()
        if self._drawn is not None and self._expected:  # chunks of prompts have no tokens to wait for
            self._arrive(*self._drawn.wait())
        self._drawn = None  # frees the logits too
        self._output.phase_seconds["sample"] = time.perf_counter() - started
        self.has_arrived = True
        return self._output

    def _arrive(self, token_ids: list[int], others: set[int]) -> None:
        output = self._output
        for expected, token_id in zip(self._expected, token_ids, strict=True):
            if expected.is_void:
                continue
            output.sampled_token_ids[expected.request_id] = [token_id]
            if expected.arrive(token_id, is_other=expected.row in others):
                output.void_request_ids.append(expected.request_id)
