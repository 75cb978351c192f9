"""Detects an output that ends in a repeated pattern of tokens. Imports no torch."""

from collections.abc import Sequence

from headrace_engine.sampling_params import RepetitionDetectionParams


def ends_in_repetition(token_ids: Sequence[int], start: int, params: RepetitionDetectionParams) -> bool:
    """Whether `token_ids[start:]` ends with `min_count` copies of a pattern of an allowed length.

    An earlier repetition does not count: the model has left it.
    """
    last, length = token_ids[-1], len(token_ids) - start
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        needed = size * params.min_count
        if needed > length:
            return False
        if token_ids[-1 - size] == last:  # else it cannot be, and most sizes end here
            tail = token_ids[-needed:]
            if tail[size:] == tail[:-size]:
                return True
    return False
