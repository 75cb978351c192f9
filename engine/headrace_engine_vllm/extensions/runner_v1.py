"""Lets vLLM's old model runner (v1) continue a request exactly after its emitted tokens. Used in each rank.

v1 gets only the prompt of a request. Here it also gets the emitted tokens, in a field of the scheduler's output that v1
does not read (`prefill_token_ids`), and its random generator is advanced past them. Runner v2 needs no change: it gets
the prompt and all tokens, and draws from (seed, position).

This also repairs a fault: v1 rewinds the generator of a seeded request after each part of a long prompt, by methods
that only CUDA's generators have. On a CPU this ends the engine.
"""

from typing import TYPE_CHECKING, Any

import torch
import vllm.v1.worker.gpu_model_runner as runner

from headrace_engine_vllm.extensions.rank import RankExtension

if TYPE_CHECKING:
    from collections.abc import Sequence

_emitted: dict[str, list[int]] = {}
"""Emitted tokens of the new requests of the current step, by request id."""


class CountedGenerator(torch.Generator):
    """A CPU generator that can be rewound to the position after its request's tokens."""

    def begin(self, seed: int, tokens: "Sequence[int]") -> None:
        self._seed, self._tokens = seed, tokens
        self._rewind()

    def _rewind(self) -> None:
        self.manual_seed(self._seed)
        for _ in self._tokens:  # vLLM's CPU sampler draws one number for each token
            torch.randint(0, 2**31, (1,), generator=self, dtype=torch.long)

    def get_offset(self) -> int:
        return 4  # the runner subtracts 4, the size of a draw on CUDA

    def set_offset(self, _: int) -> torch.Generator:
        self._rewind()
        return self


_plain_state: Any = runner.CachedRequestState
_plain_update = runner.GPUModelRunner._update_states


class _ResumingState(_plain_state):
    def __post_init__(self) -> None:
        super().__post_init__()
        emitted = _emitted.get(self.req_id)
        if emitted and not self.output_token_ids:
            self.output_token_ids.extend(emitted)
        plain = getattr(self, "generator", None)
        if plain is not None and plain.device.type == "cpu":
            counted = CountedGenerator(device="cpu")
            counted.begin(self.sampling_params.seed, self.output_token_ids)
            self.generator = counted


def _update_states(self: Any, scheduler_output: Any) -> Any:
    for new in scheduler_output.scheduled_new_reqs:
        if new.prefill_token_ids is not None and new.prompt_token_ids is not None:
            _emitted[new.req_id] = new.prefill_token_ids[len(new.prompt_token_ids) :]
    try:
        return _plain_update(self, scheduler_output)
    finally:
        _emitted.clear()


runner.CachedRequestState = _ResumingState
runner.GPUModelRunner._update_states = _update_states


class RankExtensionV1(RankExtension):
    """vLLM's `worker_extension_cls`. Through it, each rank imports this module before it creates its runner."""
