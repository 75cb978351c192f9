"""Finds out by the first requests of an engine whether it continues an interrupted request exactly.

vLLM's random draws differ by version and device, so a table of versions would become outdated.
"""

import logging
from typing import TYPE_CHECKING, Final

from headrace_engine.errors import ConfigError
from headrace_engine.options.capabilities import ExactResume
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace_engine.core.serving import Core

logger = logging.getLogger(__name__)

_PROMPT: Final = 8
_TOKENS: Final = 6
_CUT: Final = 3
_SEED: Final = 77


def exact_resume(core: "Core") -> ExactResume:
    """Generate tokens with a seed and a penalty, once without and once with an interruption, and compare.

    These steps also compile the kernels that vLLM compiles at first use, so that no client waits for them.

    Raises:
        ConfigError: the model does not generate text.
    """
    if core.model_info.max_model_len < _PROMPT + _TOKENS:
        return "greedy"
    greedy, whole = _tokens(core, "greedy", 0.0, []), _tokens(core, "whole", 1.0, [])
    resumed = whole[:_CUT] + _tokens(core, "resumed", 1.0, whole[:_CUT])
    greedy_resumed = greedy[:_CUT] + _tokens(core, "greedy-resumed", 0.0, greedy[:_CUT])
    if greedy_resumed != greedy:
        logger.warning("vLLM does not resume requests exactly here: an interrupted request continues with other tokens")
        return "none"
    if resumed != whole:
        logger.warning(
            "vLLM does not resume seeded draws here: only greedy requests continue exactly after an interruption"
        )
        return "greedy"
    return "all"


def _tokens(core: "Core", name: str, temperature: float, emitted: list[int]) -> list[int]:
    ids = [token_id % core.model_info.vocab_size for token_id in range(1, _PROMPT + 1)]
    params = SamplingParams(temperature=temperature, max_tokens=_TOKENS, ignore_eos=True, presence_penalty=1.0)
    core.add_request(
        EngineCoreRequest(
            request_id=f"probe-{name}",
            prompt_token_ids=ids,
            sampling_params=params,
            seed=_SEED,
            output_token_ids=list(emitted),
        )
    )
    found: list[int] = []
    while core.has_work():
        for output in core.step().outputs:
            if output.error is not None:
                raise ConfigError(f"vLLM does not generate text with this model: {output.error}")
            found += output.new_token_ids
    return found
