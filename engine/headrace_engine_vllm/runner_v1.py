"""What makes vLLM's old model runner (v1) go on exactly behind emitted tokens. In each process that runs the model.

v1 is told a request's prompt only. Here it is told the emitted tokens as well, which the scheduler sends in a field
that v1 does not read (`prefill_token_ids`), and its random generator is put where it was. Runner v2 needs none of it:
it is told prompt and all tokens apart, and draws from (seed, position).

It also mends a fault: v1 winds a seeded request's generator back after each part of a long prompt, by means that only
CUDA's generators have; on a CPU that ends the engine.
"""

from typing import TYPE_CHECKING, Any

import torch
import vllm.v1.worker.gpu_model_runner as runner

from headrace_engine_vllm.rank import RankExtension

if TYPE_CHECKING:
    from collections.abc import Sequence

_emitted: dict[str, list[int]] = {}
"""Of the new requests of the step whose states are being updated."""


class CountedGenerator(torch.Generator):
    """A CPU generator that is wound back to behind the tokens that its request has."""

    def begin(self, seed: int, tokens: "Sequence[int]") -> None:
        self._seed, self._tokens = seed, tokens
        self._put_back()

    def _put_back(self) -> None:
        self.manual_seed(self._seed)
        for _ in self._tokens:  # as vLLM's CPU sampler does: one number a token
            torch.randint(0, 2**31, (1,), generator=self, dtype=torch.long)

    def get_offset(self) -> int:
        return 4  # from which the runner subtracts 4, what a draw takes on CUDA

    def set_offset(self, _: int) -> torch.Generator:
        self._put_back()
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
    """Named as vLLM's `worker_extension_cls`, so that each rank imports this module before it makes its runner."""
