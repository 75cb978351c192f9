"""Converts Headrace's requests to vLLM's, and vLLM's outputs to Headrace's."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

from headrace_engine.core.outputs import EngineCoreOutput
from headrace_engine.errors import NOTHING_MAY_FOLLOW
from headrace_engine.requests.request import EngineCoreRequest, FinishReason, LoRAVersion
from headrace_engine_vllm.errors import sentence_of

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput as VLLMOutput
    from vllm.v1.request import Request

    from headrace_engine.requests.sampling_params import SamplingParams as OurSamplingParams
    from headrace_engine.runner.contracts import TokenLogprobs

_SAME: Final = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
)
_NO_SEED: Final = -1
_ALL: Final = -1
"""vLLM's number of log-probabilities for those of the whole vocabulary."""
_REASONS: Final = tuple(FinishReason(name) for name in ("stop", "length", "abort", "error", "repetition"))
"""In the order of vLLM's numbers for finish reasons."""


@dataclass(slots=True, kw_only=True)
class HeldRequest:
    """A request that has been added to vLLM."""

    message: EngineCoreRequest
    vllm_id: str
    lora: LoRAVersion | None
    theirs: "Request | None" = None
    """vLLM's record of the request. It shows why the request failed."""
    is_admitted: bool = False
    """Whether a step has computed tokens of it."""


def sampling_params(message: EngineCoreRequest, grammar: StructuredOutputsParams | None) -> SamplingParams:
    """Return vLLM's sampling parameters. Raises ValueError with vLLM's message if vLLM refuses them."""
    given = message.sampling_params
    values = {name: getattr(given, name) for name in _SAME}
    if given.repetition_detection is not None:
        values["repetition_detection"] = RepetitionDetectionParams(**asdict(given.repetition_detection))
    params = SamplingParams(
        **values,
        # vLLM has `logprob_token_ids` too, but gives such a request the log-probabilities that its neighbours ask for
        logprobs=_ALL if given.logprob_token_ids else given.logprobs,
        structured_outputs=grammar,
        temperature=0.0 if given.is_greedy else given.temperature,
        # the end of the grammar ends the output: vLLM would continue without a grammar
        ignore_eos=given.ignore_eos and grammar is None,
        # a request that resumes has sent them with its first token
        prompt_logprobs=None if message.output_token_ids else given.prompt_logprobs,
        seed=message.seed if message.seed != _NO_SEED else -2,  # -1 means no seed in vLLM
        stop_token_ids=list(given.stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )
    if message.bad_words_token_ids:
        params._bad_words_token_ids = message.bad_words_token_ids
    return params


def output_of(request: HeldRequest, theirs: "VLLMOutput", eos_token_ids: frozenset[int]) -> EngineCoreOutput:
    """Return the output of one request in one step."""
    output = EngineCoreOutput(request.message.request_id, theirs.new_token_ids)
    if theirs.prefill_stats is not None:
        cached = theirs.prefill_stats.num_cached_tokens
        output.num_cached_tokens = min(cached, len(request.message.prompt_token_ids))
    if theirs.new_logprobs is not None:
        output.logprobs = _logprobs(theirs.new_logprobs, request.message.sampling_params)
    if theirs.new_prompt_logprobs_tensors is not None:
        output.prompt_logprobs = _positions(*theirs.new_prompt_logprobs_tensors[:3])
    if theirs.finish_reason is not None:
        output.finish_reason = _REASONS[theirs.finish_reason]
        output.stop_reason = _stop_reason(request, theirs.stop_reason, eos_token_ids)
        if output.finish_reason is FinishReason.ERROR:
            output.new_token_ids, output.logprobs = [], None  # the grammar does not allow these tokens
            output.error = _why_it_failed(request)
    return output


def _stop_reason(request: HeldRequest, reason: int | str | None, eos_token_ids: frozenset[int]) -> int | str | None:
    """Return the stop token. Leave out a second end token of the model, which vLLM reports as a stop token."""
    params = request.message.sampling_params
    ends_at_eos = not params.ignore_eos or params.structured_outputs is not None
    return None if reason in eos_token_ids and ends_at_eos else reason


def _why_it_failed(request: HeldRequest) -> str:
    """Return why a request failed, from vLLM's record of it. Its output has no reason."""
    structured = request.theirs.structured_output_request if request.theirs is not None else None
    if structured is None:
        return "vLLM could not continue this request and gives no reason; see its log"
    grammar = structured.grammar
    if isinstance(grammar, Exception):
        return f"structured_outputs: vLLM cannot compile the grammar: {sentence_of(grammar)}"
    return NOTHING_MAY_FOLLOW


def _logprobs(lists: Any, params: "OurSamplingParams") -> "list[TokenLogprobs]":
    """Return what the request asked for. vLLM returns as many entries for all requests of a batch as one asks for."""
    ids, logprobs, ranks = lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks
    if params.logprob_token_ids is not None:
        named = list(dict.fromkeys(params.logprob_token_ids))
        rows = zip(ids, logprobs, ranks.tolist(), strict=True)
        return [_named(*row, named) for row in rows]
    end = None if params.logprobs == _ALL else (params.logprobs or 0) + 1
    return _positions(ids[:, :end], logprobs[:, :end], ranks)


def _named(ids: Any, logprobs: Any, rank: int, named: list[int]) -> "TokenLogprobs":
    """Return the drawn token, then the named ones, from the row of the whole vocabulary."""
    places = np.empty(int(ids.max()) + 1, dtype=np.int64)
    places[ids[1:]] = np.arange(1, len(ids))
    drawn = int(ids[0])
    others = [(each, int(places[each])) for each in named if each != drawn]
    return [(drawn, float(logprobs[0]), rank)] + [(each, float(logprobs[place]), place) for each, place in others]


def _positions(ids: Any, logprobs: Any, ranks: Any) -> "list[TokenLogprobs]":
    rows = zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    return [_position(*row) for row in rows]


def _position(ids: list[int], logprobs: list[float], rank: int) -> "TokenLogprobs":
    """Return the drawn token, then the other likeliest tokens. The position of these is their rank."""
    others = zip(ids[1:], logprobs[1:], strict=True)
    return [(ids[0], logprobs[0], rank)] + [
        (token_id, logprob, place) for place, (token_id, logprob) in enumerate(others, 1) if token_id != ids[0]
    ]
