"""Checks requests against one model and engine: vocabulary, context, logits processors, capabilities."""

from collections.abc import Iterable, Sequence

from headrace_engine.errors import ContextLengthError, InvalidRequestError, LoRAError
from headrace_engine.options.capabilities import CapabilityChecks, EngineCapabilities
from headrace_engine.options.logits_processor import LogitsProcessor
from headrace_engine.plain_values import shown
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.contracts import ModelInfo


class RequestChecks:
    """Raise InvalidRequestError with all problems."""

    def __init__(
        self,
        model_info: ModelInfo,
        max_logprobs: int,
        logits_processors: Sequence[type[LogitsProcessor]],
        engine: str,
        capabilities: EngineCapabilities,
    ) -> None:
        self._info = model_info
        self._engine = engine
        self._capabilities = capabilities
        self._capability_checks = CapabilityChecks(engine, capabilities, model_info.eos_token_ids)
        self._max_logprobs = max_logprobs
        self._logits_processors = logits_processors
        self._extra_args = {name for processor in logits_processors for name in processor.extra_args}

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raise ContextLengthError if the prompt leaves no room for a token."""
        if not token_ids:
            raise InvalidRequestError("the prompt is empty")
        limit = self._info.max_model_len
        if len(token_ids) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens and leaves no room for output: "
                f"this model's maximum context length is {limit} tokens, prompt and output together"
            )

    def check_params(
        self, token_ids: Sequence[int], params: SamplingParams, bad_words_token_ids: Sequence[Sequence[int]]
    ) -> None:
        problems = [
            *self._vocabulary_problems("prompt_token_ids", token_ids),
            *self._vocabulary_problems("stop_token_ids", params.stop_token_ids),
            *self._vocabulary_problems("allowed_token_ids", params.allowed_token_ids or ()),
            *self._vocabulary_problems("logit_bias", params.logit_bias or ()),
            *self._vocabulary_problems("logprob_token_ids", params.logprob_token_ids or ()),
            *self._logprobs_problems("logprobs", params.logprobs),
            *self._logprobs_problems("prompt_logprobs", params.prompt_logprobs),
            *self._extra_args_problems(params),
            *self._capability_checks.problems(params, bad_words_token_ids),
        ]
        if params.allowed_token_ids is not None:
            problems += self._nothing_allowed_problems(params.allowed_token_ids, params, bad_words_token_ids)
        if problems:
            raise InvalidRequestError(problems)

    def check_features(self, priority: int, cache_salt: str, lora_request: LoRARequest | None) -> None:
        """Check the features of a request other than its sampling parameters.

        Raises:
            LoRAError: the engine serves no adapters.
            InvalidRequestError: the engine does not support priorities or salts.
        """
        can = self._capabilities
        if lora_request is not None and not can.lora:
            raise LoRAError(
                f"lora_request is {lora_request.lora_name!r}, but the engine {self._engine} serves no LoRA adapters:"
                " enable_lora is not set"
            )
        problems = []
        if priority != 0 and not can.priority:
            problems.append(f"priority must be 0 with the engine {self._engine}, got {priority}")
        if cache_salt and not can.cache_salt:
            problems.append(f"cache_salt is set, which the engine {self._engine} does not support")
        if problems:
            raise InvalidRequestError(problems)

    def _vocabulary_problems(self, name: str, token_ids: Iterable[int]) -> list[str]:
        size = self._info.vocab_size
        bad = next((token for token in token_ids if not 0 <= token < size), None)
        return [] if bad is None else [f"{name} must be token ids from 0 to {size - 1}, got {shown(bad)}"]

    def _logprobs_problems(self, name: str, wanted: int | None) -> list[str]:
        if wanted is None or self._max_logprobs == -1:
            return []
        count = self._info.vocab_size if wanted == -1 else wanted
        if count <= self._max_logprobs:
            return []
        value = f"-1, which is {count}" if wanted == -1 else str(wanted)
        return [f"{name} must be at most {self._max_logprobs}, the engine's max_logprobs, got {value}"]

    def _extra_args_problems(self, params: SamplingParams) -> list[str]:
        names = params.extra_args or {}
        problems = [
            f"extra_args holds {name[:40]!r}, which no logits processor of this engine reads"
            for name in names
            if name not in self._extra_args
        ]
        if problems:
            return problems
        for processor in self._logits_processors:
            try:
                processor.validate_params(params)
            except ValueError as error:
                problems.append(f"logits processor {processor.__name__} refuses: {error}")
        return problems

    def _nothing_allowed_problems(
        self, allowed: Sequence[int], params: SamplingParams, bad_words_token_ids: Sequence[Sequence[int]]
    ) -> list[str]:
        left = set(allowed) - {word[0] for word in bad_words_token_ids if len(word) == 1}
        if not left:
            return ["allowed_token_ids must hold a token that bad_words does not forbid"]
        if params.min_tokens > 0 and left <= {*params.stop_token_ids, *self._info.eos_token_ids}:
            return ["allowed_token_ids must hold a token that does not end the output, since min_tokens is above 0"]
        return []
