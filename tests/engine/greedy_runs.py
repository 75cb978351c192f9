"""Runs of greedy requests in an engine core whose memory is too small for all of them."""

from collections.abc import Sequence

from headrace_engine.core.engine_core import EngineCore
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams

Requests = Sequence[tuple[list[int], int]]
"""Prompts with their max_tokens."""


def greedy_tokens(core: EngineCore, requests: Requests, *, least_hits: int) -> list[list[int]]:
    """Return the tokens of each request. Some must be preempted, and `least_hits` tokens come from the prefix cache."""
    tokens: dict[str, list[int]] = {}
    preemptions = hits = 0
    for index, (prompt, max_tokens) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        core.add_request(
            EngineCoreRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params, seed=0)
        )
    while core.has_work():
        result = core.step()
        preemptions += result.stats.preemptions
        hits += result.stats.prefix_hit_tokens
        for news in result.outputs:
            tokens.setdefault(news.request_id, []).extend(news.new_token_ids)
    core.check_integrity()
    assert preemptions >= 1
    assert hits >= least_hits
    return [tokens[str(index)] for index in range(len(requests))]
