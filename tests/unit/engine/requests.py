"""Short ways to make the core's requests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.lora_manager import LoRAManager
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.request import EngineCoreRequest, FinishReason, Request
from headrace_engine.requests.sampling_params import SamplingParams
from unit.engine.fake_runner import EOS


def core_request(
    request_id: str = "a",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    output: Sequence[int] = (),
    seed: int = 0,
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str = "",
    lora: str | None = None,
    **params: Any,
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        sampling_params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=[EOS],
        priority=priority,
        arrival_time=arrival_time,
        cache_salt=cache_salt,
        lora_request=LoRARequest(lora, lora_path=f"/{lora}") if lora else None,
    )


def request(request_id: str = "a", prompt: Sequence[int] = (1, 2, 3), *, block_size: int = 4, **more: Any) -> Request:
    return Request(core_request(request_id, prompt, **more), block_size)


class _AtOnce(Executor):
    """Runs what it is given before it returns."""

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # as an executor does
            done.set_exception(error)
        return done


def load_at_once(loras: LoRAManager) -> None:
    """Read adapters where a test stands, not in a thread: what happens next does not depend on the clock."""
    loras._executor = _AtOnce()  # type: ignore[assignment]


class Results:
    """What came out of a core, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.stop_reasons: dict[str, int | str | None] = {}
        self.errors: dict[str, str] = {}
        self.prompt_logprobs: dict[str, list[Any]] = {}
        self.cached: dict[str, int] = {}
        self.preemptions = 0
        self.hit_tokens = 0
        self.kinds: list[str] = []

    def step(self, core: EngineCore) -> None:
        result = core.step()
        core.check_integrity()
        self.preemptions += result.stats.preemptions
        self.hit_tokens += result.stats.prefix_hit_tokens
        if result.stats.num_requests:
            self.kinds.append(result.stats.kind)
        for news in result.outputs:
            assert news.request_id not in self.finished, f"{news.request_id} continues after its end"
            self.tokens.setdefault(news.request_id, []).extend(news.new_token_ids)
            self.cached[news.request_id] = news.num_cached_tokens
            if news.prompt_logprobs is not None:
                assert news.request_id not in self.prompt_logprobs, "prompt log-probabilities came twice"
                self.prompt_logprobs[news.request_id] = news.prompt_logprobs
            if news.error is not None:
                self.errors[news.request_id] = news.error
            if news.finish_reason is not None:
                self.finished[news.request_id] = news.finish_reason
                self.stop_reasons[news.request_id] = news.stop_reason

    def drain(self, core: EngineCore, most_steps: int = 2000) -> Results:
        steps = 0
        while core.has_work():
            assert steps < most_steps, "no progress"
            self.step(core)
            steps += 1
        return self
