"""A smaller model that drafts the next tokens of the served one.

It has its own K/V memory, with the same block ids, so the scheduler allocates blocks once for both models. In every
step it first computes the K/V of the tokens that the served model has computed. Then it drafts, one token at a time. It
draws with the parameters of the request and the same u for each position. So both models draw the same token if their
distributions are equal.
"""

from collections.abc import Sequence
from dataclasses import replace

from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.batch import RequestBatch, RunningRequest, TokenSpan, sampling_rows
from headrace_engine.runner.contracts import ModelInfo, StepBatch
from headrace_engine.runner.models.paged_model import PagedModel
from headrace_engine.runner.sampling.sampler import NO_TOKEN, draw_tokens


class DraftModel:
    """Drafts tokens with a second `PagedModel`.

    Args:
        config: its `speculative` has the method draft_model.
        served: the model that verifies the drafts.

    Raises:
        ModelLoadError: the draft model cannot be loaded.
        ConfigError: the draft model has another vocabulary, or positions for fewer tokens.
    """

    def __init__(self, config: EngineConfig, served: ModelInfo) -> None:
        speculative = config.speculative
        assert speculative is not None and speculative.model is not None
        self._num_tokens = speculative.num_speculative_tokens
        self._max_model_len = served.max_model_len
        self._block_size = config.cache.block_size
        try:
            model_config = replace(
                config.model,
                model=speculative.model,
                max_model_len=served.max_model_len,
                revision=None,  # these belong to the served model
                tokenizer_revision=None,
                generation_config="vllm",
                override_generation_config={},
                batch_invariant=False,  # drafts need not be exact to the last bit
            )
            self._model = PagedModel(model_config, config.cache)
        except ConfigError as error:
            raise ConfigError(f"speculative_config.model {speculative.model!r}: {error}") from error
        if self._model.bytes_per_state:
            raise ConfigError(
                f"speculative_config.model {speculative.model!r} has recurrent layers, whose states cannot be taken "
                "back when a draft is rejected: choose a model with attention only"
            )
        if self._model.info.vocab_size != served.vocab_size:
            raise ConfigError(
                f"speculative_config.model {speculative.model!r} has {self._model.info.vocab_size} tokens in its "
                f"vocabulary, the served model {served.vocab_size}: drafts need the same vocabulary"
            )

    @property
    def bytes_per_block(self) -> int:
        return self._model.bytes_per_block

    @property
    def info(self) -> ModelInfo:
        return self._model.info

    def allocate(self, num_blocks: int) -> None:
        self._model.allocate(num_blocks)

    def propose(self, requests: RequestBatch, step: StepBatch, sampled_ids: Sequence[str]) -> dict[str, list[int]]:
        """Catch up with the step of the served model, then draft after the tokens that it drew.

        Returns:
            The drafts of the requests that may still have any.
        """
        spans: list[TokenSpan] = []
        wanted: dict[str, int] = {}
        drawn = set(sampled_ids)
        for request_id in step.num_scheduled_tokens:
            request = requests.requests[request_id]
            # K/V after the tokens that the served model has accepted may belong to rejected drafts.
            start = min(request.num_draft_computed, request.num_computed_tokens)
            count = self._num_drafts(request) if request_id in drawn else 0
            end = len(request.token_ids) if count > 0 else request.num_computed_tokens
            request.num_draft_computed = end
            if count > 0:
                wanted[request_id] = count
            if end > start:
                spans.append(TokenSpan(request, start, request.token_ids[start:end], 1 if count > 0 else 0))
        if not spans:
            return {}
        drafts: dict[str, list[int]] = {request_id: [] for request_id in wanted}
        active = list(wanted)
        while spans:
            tokens = self._draw(requests, spans, active, drafts)
            going_on = []
            for request_id, token_id in zip(active, tokens, strict=True):
                if token_id == NO_TOKEN:
                    continue
                drafts[request_id].append(token_id)
                if len(drafts[request_id]) < wanted[request_id]:
                    going_on.append(request_id)
            active = going_on
            spans = [self._next_span(requests.requests[request_id], drafts[request_id]) for request_id in active]
        return drafts

    def _num_drafts(self, request: RunningRequest) -> int:
        """Return how many drafts fit in the blocks of the request and within its length limits."""
        length, params = len(request.token_ids), request.params
        left = request.num_blocks * self._block_size - length + 1
        count = min(self._num_tokens, left, self._max_model_len - length - 1)
        return count if params.max_tokens is None else min(count, params.max_tokens - request.num_output_tokens - 1)

    def _draw(
        self, requests: RequestBatch, spans: list[TokenSpan], active: list[str], drafts: dict[str, list[int]]
    ) -> list[int]:
        logits = self._model.forward(requests.pack(spans, active, {}))
        if not active:
            return []
        prefixes = [(requests.requests[request_id], drafts[request_id]) for request_id in active]
        return draw_tokens(logits, sampling_rows(prefixes))

    @staticmethod
    def _next_span(request: RunningRequest, draft: list[int]) -> TokenSpan:
        request.num_draft_computed += 1
        return TokenSpan(request, len(request.token_ids) + len(draft) - 1, draft[-1:], 1)
