"""The core of the small engine: logits are a hash of the tokens so far, and a step draws one token a request."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from headrace_engine.core.outputs import EngineCoreOutput, EngineCoreOutputs, StepStats
from headrace_engine.core.stop_check import check_stop
from headrace_engine.errors import ConfigError, InvalidRequestError
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.requests.request import EngineCoreRequest, FinishReason, Request
from headrace_engine.runner.contracts import ModelInfo, TokenLogprobs
from unit.engine.fake_runner import EOS, VOCAB_SIZE
from unit.engine.letters import load_tokenizer

BLOCK_SIZE = 16
MAX_BIAS = 40
STATS = (
    "step_seconds",
    "kind",
    "num_tokens",
    "num_requests",
    "running",
    "waiting",
    "kv_blocks_used",
    "kv_blocks_free",
    "kv_blocks_total",
    "admitted_choice_ids",
)


class SmallCore:
    """Implements `headrace_engine.core.serving.Core`."""

    wake: Callable[[], None]

    def __init__(self, config: Any) -> None:
        self.fault = config.engine_args.get("fault", "")
        if config.model.max_model_len > 1 << 16 and self.fault != "starts_with_any_option":
            raise ConfigError(f"max_model_len is {config.model.max_model_len}, at most {1 << 16} is possible")
        self._most = config.scheduler.max_num_seqs
        self._by_priority = config.scheduler.policy == "priority" and self.fault != "ignores_priority"
        self.model_info = ModelInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=config.model.max_model_len,
            eos_token_ids=[EOS],
            architecture="Small",
            dtype="float64",
            device="none",
            attention="none",
            num_parameters=0,
        )
        self.capabilities = EngineCapabilities(
            draws="small",
            exact_resume="all",
            max_logit_bias=MAX_BIAS,
            temperature_range=(0.0, 5.0),
            prompt_logprobs=True,
            repetition_detection=True,
            min_tokens=True,
            bad_words=True,
            priority=config.scheduler.policy == "priority",
            stats=(*STATS, "no_such_field") if self.fault == "claims_what_no_request_can_ask_for" else STATS,
        )
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._answers: list[EngineCoreOutput] = []
        self._emitted: dict[str, int] = {}
        self._leaked = 0
        self._ended_since_last_step = False

    # -- what the parent sends ------------------------------------------------------------------------------------

    def add_request(self, message: EngineCoreRequest) -> None:
        problem = self._problem(message)
        if problem is not None:
            self._answers.append(
                EngineCoreOutput(message.request_id, [], finish_reason=FinishReason.ERROR, error=problem)
            )
            return
        emitted = len(message.output_token_ids)
        request = Request(message, BLOCK_SIZE)
        if emitted and self.fault == "resumes_prompt":
            request.num_prompt_tokens += emitted
            most = request.sampling_params.max_tokens
            if most is not None:
                request.sampling_params.max_tokens = most - emitted
        if emitted and self.fault == "prompt_logprobs_again" and request.sampling_params.prompt_logprobs is not None:
            request.prompt_logprobs = []
        self._emitted[request.request_id] = emitted
        if emitted and self.fault != "resumes_ended":
            reason, stop = check_stop(request, self.model_info.max_model_len)
            if reason is not None:
                self._answers.append(EngineCoreOutput(request.request_id, [], finish_reason=reason, stop_reason=stop))
                return
        self._waiting.append(request)
        if self._by_priority:
            self._waiting.sort(key=lambda r: (r.priority, r.arrival_time))
        if self.fault == "order_backwards":
            self._waiting.reverse()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        gone = set(request_ids)
        if self.fault == "keeps_aborted":
            return
        count = len(self._running)
        self._waiting = [request for request in self._waiting if request.request_id not in gone]
        self._running = [request for request in self._running if request.request_id not in gone]
        self._ended_since_last_step |= len(self._running) < count

    def call(self, method: str, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        if method == "tokenizer":
            done.set_result(asdict(load_tokenizer(None)))
        elif method == "reset_prefix_cache":
            done.set_result(True)
        elif self.fault != "unanswered_call":
            done.set_exception(InvalidRequestError(f"engine small does not know the call {method!r}"))
        return done

    def _problem(self, message: EngineCoreRequest) -> str | None:
        params, length = message.sampling_params, len(message.prompt_token_ids)
        if not 0 < length < self.model_info.max_model_len:
            if length and self.fault == "dies_of_a_long_prompt":
                os._exit(1)
            return f"the prompt has {length} tokens, from 1 to {self.model_info.max_model_len - 1} are possible"
        if message.lora_request is not None and self.fault != "no_error_for_an_adapter":
            return "engine small serves no LoRA adapters"
        if params.structured_outputs is not None:
            return "engine small has no structured_outputs"
        most = MAX_BIAS // 2 if self.fault == "serves_less_than_it_claims" else MAX_BIAS
        if len(params.logit_bias or ()) > most:
            return f"logit_bias has {len(params.logit_bias or ())} entries, at most {most} are possible"
        return None

    # -- steps ----------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._answers or self._ended_since_last_step)

    def step(self) -> EngineCoreOutputs:
        started = time.perf_counter()
        self._ended_since_last_step = False
        stats = StepStats()
        room = self._most - len(self._running)
        admitted, self._waiting = self._waiting[:room], self._waiting[room:]
        self._running += admitted
        stats.admitted_choice_ids = [request.request_id for request in admitted]
        stats.num_requests = len(self._running)
        stats.num_tokens = len(self._running) - len(admitted) + sum(request.num_tokens for request in admitted)
        stats.kind = "decode" if not admitted else "prefill" if len(admitted) == len(self._running) else "mixed"
        outputs = [self._advance(request) for request in self._running]
        ended = {output.request_id for output in outputs if output.finish_reason is not None}
        stats.kv_blocks_total = 1000
        self._running = [request for request in self._running if request.request_id not in ended]
        self._leaked += len(ended) if self.fault == "leaks_blocks" else 0
        stats.kv_blocks_used = self._leaked + sum(-(-request.num_tokens // BLOCK_SIZE) for request in self._running)
        stats.kv_blocks_free = stats.kv_blocks_total - stats.kv_blocks_used
        stats.running, stats.waiting = len(self._running), len(self._waiting)
        answers, self._answers = self._answers, []
        stats.step_seconds = time.perf_counter() - started
        if self.fault == "cold_statistics":
            stats = StepStats(kv_blocks_total=1000, kv_blocks_free=1000)
        return EngineCoreOutputs(outputs=answers + outputs, stats=stats)

    def _advance(self, request: Request) -> EngineCoreOutput:
        params = request.sampling_params
        raw = _log_softmax(_logits(request.token_ids))
        output = EngineCoreOutput(request.request_id, [])
        if request.prompt_logprobs is not None:
            output.prompt_logprobs, request.prompt_logprobs = _prompt_logprobs(request), None
        token = self._draw(request, raw)
        if token is None:
            output.finish_reason, output.error = FinishReason.ERROR, "no token is left that may follow"
            return output
        if params.logprobs is not None:
            shown = raw if self.fault != "processed_logprobs" else _log_softmax(_change(request, raw))
            output.logprobs = [_entry(shown, token, params.logprobs, int(self.fault == "wrong_rank"))]
        first = request.num_output_tokens == self._emitted[request.request_id]
        request.append_token(token)
        output.new_token_ids = [token]
        if first and self.fault == "sends_emitted" and self._emitted[request.request_id]:
            output.new_token_ids = [*request.token_ids[request.num_prompt_tokens : -1], token]
        if self.fault == "doubled_token" and request.num_output_tokens == 7:
            output.new_token_ids = [token, token]
        output.finish_reason, output.stop_reason = check_stop(request, self.model_info.max_model_len)
        if self.fault == "loses_stop_token" and output.stop_reason == token:
            output.new_token_ids = []
        if self.fault == "end_token_as_stop_reason" and output.finish_reason is FinishReason.STOP:
            output.stop_reason = token
        return output

    def _draw(self, request: Request, raw: list[float]) -> int | None:
        params, seed = request.sampling_params, request.seed
        allowed = [token for token in range(VOCAB_SIZE) if token not in self._forbidden(request)]
        if not allowed:
            return None
        logits = _change(request, raw)
        best = max(allowed, key=lambda token: logits[token])
        if params.is_greedy:
            return best
        kept = sorted(allowed, key=lambda token: -logits[token])[: params.top_k or VOCAB_SIZE]
        weights = [math.exp((logits[token] - logits[best]) / params.temperature) for token in kept]
        kept = kept[: sum(weight >= params.min_p for weight in weights)]
        total, count = sum(weights[: len(kept)]), 0
        gathered = 0.0
        while count < len(kept) and (not count or gathered < params.top_p * total):
            gathered += weights[count]
            count += 1
        if self.fault == "batch_draws":
            seed += len(self._running)
        if self.fault == "equal_seeds":
            seed = 0
        number = _uniform(seed, request.num_tokens) * gathered
        for token, weight in zip(kept[:count], weights, strict=False):
            number -= weight
            if number < 0:
                return token
        return kept[count - 1]

    def _forbidden(self, request: Request) -> set[int]:
        params, output = request.sampling_params, request.token_ids[request.num_prompt_tokens :]
        forbidden = set()
        if params.allowed_token_ids is not None:
            forbidden |= set(range(VOCAB_SIZE)) - set(params.allowed_token_ids)
        start = self._emitted[request.request_id] if self.fault == "min_tokens_from_the_resume" else 0
        if len(output) - start < params.min_tokens:
            forbidden |= request.stop_token_ids | request.eos_token_ids
        for word in request.bad_words_token_ids:
            if output[len(output) - len(word) + 1 :] == word[:-1] or len(word) == 1:
                forbidden.add(word[-1])
        return forbidden

    def check_integrity(self) -> None:
        assert not self._running

    def shutdown(self) -> None:
        pass


def _change(request: Request, raw: list[float]) -> list[float]:
    """The logits after bias and penalties."""
    params, output = request.sampling_params, request.token_ids[request.num_prompt_tokens :]
    logits = list(raw)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in set(request.token_ids):
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return logits


def _logits(token_ids: list[int]) -> list[float]:
    text = ",".join(map(str, token_ids)).encode()
    digest = b"".join(hashlib.blake2b(text, person=bytes([part])).digest() for part in range(2))
    numbers = [int.from_bytes(digest[2 * token : 2 * token + 2], "big") for token in range(VOCAB_SIZE)]
    return [number / 2**13 + token * 1e-7 for token, number in enumerate(numbers)]


def _log_softmax(logits: list[float]) -> list[float]:
    most = max(logits)
    total = most + math.log(sum(math.exp(logit - most) for logit in logits))
    return [logit - total for logit in logits]


def _entry(values: list[float], token: int, count: int, shift: int = 0) -> TokenLogprobs:
    order = sorted(range(VOCAB_SIZE), key=lambda candidate: -values[candidate])
    ranks = {candidate: rank + shift for rank, candidate in enumerate(order, 1)}
    return [(t, values[t], ranks[t]) for t in (token, *(best for best in order[:count] if best != token))]


def _prompt_logprobs(request: Request) -> list[TokenLogprobs]:
    tokens, count = request.token_ids, request.sampling_params.prompt_logprobs
    assert count is not None
    return [
        _entry(_log_softmax(_logits(tokens[:place])), tokens[place], count)
        for place in range(1, request.num_prompt_tokens)
    ]


def _uniform(seed: int, position: int) -> float:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest(), "big") / 2**64
