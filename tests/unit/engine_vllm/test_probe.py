"""What an engine claims of resumed requests is what its first requests show."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import pytest

from headrace_engine.core.outputs import EngineCoreOutput, EngineCoreOutputs, StepStats
from headrace_engine.errors import ConfigError
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine_vllm.probe import exact_resume


class CountingCore:
    """Its next token is a function of the seed and of how many tokens it believes to have drawn."""

    capabilities = EngineCapabilities()

    def __init__(self, forgets: str = "", refuses: str | None = None, max_model_len: int = 100) -> None:
        self.model_info = ModelInfo(
            vocab_size=50,
            max_model_len=max_model_len,
            eos_token_ids=[],
            architecture="",
            dtype="",
            device="",
            attention="",
            num_parameters=0,
        )
        self._forgets = forgets
        self._refuses = refuses
        self._outputs: list[EngineCoreOutput] = []

    def wake(self) -> None: ...

    def add_request(self, message: EngineCoreRequest) -> None:
        params = message.sampling_params
        assert params.max_tokens is not None
        drawn = len(message.output_token_ids)
        forgets = self._forgets == "all" or (self._forgets == "draws" and not params.is_greedy)
        first = 0 if forgets else drawn
        tokens = [first + place for place in range(params.max_tokens - drawn)]
        self._outputs.append(EngineCoreOutput(message.request_id, tokens, error=self._refuses))

    def has_work(self) -> bool:
        return bool(self._outputs)

    def step(self) -> EngineCoreOutputs:
        outputs, self._outputs = self._outputs, []
        return EngineCoreOutputs(outputs=outputs, stats=StepStats())

    def abort_requests(self, request_ids: Iterable[str]) -> None: ...

    def call(self, method: str, *args: Any) -> Future[Any]:
        raise NotImplementedError

    def check_integrity(self) -> None: ...

    def shutdown(self) -> None: ...


@pytest.mark.parametrize(("forgets", "claim"), [("", "all"), ("draws", "greedy"), ("all", "none")])
def test_the_claim_is_what_was_seen(forgets: str, claim: str, caplog: pytest.LogCaptureFixture) -> None:
    assert exact_resume(CountingCore(forgets)) == claim
    assert len(caplog.records) == (claim != "all")


def test_a_context_that_is_too_short_to_tell_claims_no_draws() -> None:
    assert exact_resume(CountingCore(max_model_len=10)) == "greedy"


def test_a_model_that_does_not_generate_is_told() -> None:
    with pytest.raises(ConfigError, match="this model does not support generation"):
        exact_resume(CountingCore(refuses="this model does not support generation"))
