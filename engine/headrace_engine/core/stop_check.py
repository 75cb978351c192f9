"""Decides when an output ends: at an end token, a stop token, its length limit or a repetition.

The detokenizer checks stop strings.
"""

from collections.abc import Sequence

from headrace_engine.requests.request import FinishReason, Request
from headrace_engine.requests.sampling_params import RepetitionDetectionParams


def check_stop(request: Request, max_model_len: int) -> tuple[FinishReason | None, int | str | None]:
    """Return why the last token ends the request, if it does, and the stop token or the name of the cause.

    Args:
        max_model_len: tokens of prompt and output together.
    """
    params, token_id = request.sampling_params, request.token_ids[-1]
    if params.structured_outputs is not None and token_id in request.eos_token_ids:
        return FinishReason.STOP, None  # the grammar allows it, and nothing can follow it
    num_tokens = len(request.token_ids)  # faster than the properties: this runs for each token
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if num_output_tokens >= params.min_tokens:
        if token_id in request.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        if token_id in request.stop_token_ids:
            return FinishReason.STOP, token_id
    if params.max_tokens is not None and num_output_tokens >= params.max_tokens:
        return FinishReason.LENGTH, None
    if num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    detection = params.repetition_detection
    if (
        detection is not None
        and num_output_tokens >= params.min_tokens
        and ends_in_repetition(request.token_ids, request.num_prompt_tokens, detection)
    ):
        return FinishReason.REPETITION, "repetition_detected"
    return None, None


def ends_in_repetition(token_ids: Sequence[int], start: int, params: RepetitionDetectionParams) -> bool:
    """Whether `token_ids[start:]` ends with `min_count` copies of a pattern of an allowed length.

    A repetition that ends before the last token does not count: the model has continued with something else.
    """
    last, length = token_ids[-1], len(token_ids) - start
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        needed = size * params.min_count
        if needed > length:
            return False
        if token_ids[-1 - size] == last:  # a cheap test that excludes most sizes
            tail = token_ids[-needed:]
            if tail[size:] == tail[:-size]:
                return True
    return False
