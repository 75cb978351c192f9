"""The contract between the core and whatever runs the model.

`StepBatch` goes in and `StepOutput` comes out; both are plain data (ids and numbers). Imports no torch, so that the
scheduler is tested against it in milliseconds.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from headrace_engine.lora_request import LoRARequest
from headrace_engine.sampling_params import SamplingParams

DRAWS: Final = "headrace-1"
"""Name of the way in which every runner draws: the same logits, seed and position give the same token under it.

Raise the number with any change, in `rng.py`, `sampler.py` or `token_rules.py`, after which they give another token.
Then requests that a new worker continues for an old one are counted, and nobody takes their tokens for a mistake.
"""
TokenLogprobs = list[tuple[int, float, int]]
"""For one generated token: (token id, log-probability, rank from 1), the sampled token first."""


@dataclass(slots=True, kw_only=True)
class NewRequest:
    """A request that the runner does not know: new, or back after a preemption. Sent whole."""

    request_id: str
    token_ids: list[int]
    """Prompt and all output so far."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    suppressed_token_ids: list[int]
    """End and stop tokens, which the sampler must not draw before `sampling_params.min_tokens`."""
    block_ids: list[int]
    num_computed_tokens: int
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    """Token sequences whose last token must not be drawn behind the others."""
    num_prompt_logprobs: int | None = None
    """How many prompt log-probabilities the core has already; None when it wants none."""
    lora_version: int | None = None
    """The adapter that the request runs with, as given to `load_lora`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBitmask:
    """Which tokens the grammars of a step's requests allow."""

    masks: dict[str, list[bytes]]
    """Request id -> one mask for each position that is sampled: the next token's, then those behind drafted ones.

    Bit i of byte j stands for token 8 j + i; tokens behind a mask's end are not allowed. A mask includes what
    `suppressed_token_ids` would forbid, so a runner does not apply those to the request. A request without an entry is
    not restricted.
    """


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """One step. A known request appears as deltas only: how many tokens, which new blocks.

    The runner keeps a request's tokens, adds those that it samples, and counts computed tokens itself. A request
    yields a token in this step exactly when its scheduled tokens reach the last known one. A token counts as known as
    soon as the step that draws it is launched.

    With drafts, the scheduled tokens are the last known one and the drafts behind it. The runner draws a token at each
    of these positions, for as long as what it draws is the draft that stands there: the first draw that differs, or
    the one behind the last draft, is the last that it yields. K/V of drafts that were not drawn do not count as
    computed; they are written again.

    Within a layer, K/V of all scheduled tokens are written before any token attends: a request may read blocks
    that another one of the same step fills.
    """

    num_scheduled_tokens: dict[str, int]
    """Request id -> tokens to compute, at least 1; the order is the batch's order."""
    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    """Blocks appended to the block table of known requests."""
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Drafts of known requests, counted in their scheduled tokens."""
    removed_request_ids: list[str] = field(default_factory=list)
    """Finished, aborted or preempted since the last step: forget them first."""
    grammar_bitmask: "Future[GrammarBitmask] | None" = None
    """Masks that are filled while the model computes: wait for them before sampling. None for most steps."""

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(slots=True, kw_only=True)
class StepOutput:
    sampled_token_ids: dict[str, list[int]]
    """Request id -> tokens sampled in this step; absent for a prompt that is not complete yet."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Only for requests that asked, one entry a sampled token."""
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """What the runner's draft model, where it has one, guesses behind the sampled tokens."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Only for requests that want some: those of the prompt tokens that follow the tokens computed in this step, from
    the first one that the core does not have."""
    void_request_ids: list[str] = field(default_factory=list)
    """Requests whose token here is another one than that which the step launched behind this one has computed with.
    Their part of that step is void: it yields nothing for them, and the token is still to be computed."""
    errors: dict[str, str] = field(default_factory=dict)
    """Requests for which no token could be chosen, and why: the scheduler ends them, the others go on."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent in prepare, forward and sample."""
    num_padded_tokens: int = 0
    """Tokens computed only to fill a static shape."""
    compiled_graphs: int = 0
    """How many graphs the runner has compiled since it was made."""
    fallback_operators: int = 0
    """How many kinds of operators were computed on the CPU instead of the device since then."""
    warm_up_seconds: float = 0.0
    """What their compilation took before the first request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerCapabilities:
    """What a runner can do in one step; the scheduler honours it, so there is one scheduler for all devices."""

    mixed_batches: bool = True
    """Prefill and decode may share a step."""
    max_prefills_per_step: int | None = None
    chunk_sizes: Sequence[int] | None = None
    """Allowed prefill chunk lengths in tokens (shorter chunks are padded by the runner); None means any."""
    max_batch: int | None = None
    """Most requests in one step."""
    logits_of_every_token: bool = True
    """False: only of a request's last token in a step. Prompts whose log-probabilities are wanted are then computed
    token by token."""
    verifies_drafts: bool = False
    """Draws at several positions of a request in one step (`StepBatch.draft_token_ids`)."""
    lora: bool = False
    """Each request of a step may run with an adapter of its own; needs `mixed_batches`."""
    launches_ahead: bool = False
    """The runner is a `LaunchingRunner`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """What one block of KV memory costs. Block 0 is the null block and is never handed out."""

    block_size: int
    """Tokens a block."""
    bytes_per_block: int
    """Over all layers, keys and values."""
    default_memory: int
    """Bytes that the runner suggests when the operator names no budget."""
    available_memory: int | None
    """Bytes that are free, now that the weights are loaded; None where nobody can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the doors must know of a loaded model."""

    vocab_size: int
    max_model_len: int
    """Tokens of prompt and output together."""
    eos_token_ids: list[int]
    architecture: str
    dtype: str
    device: str
    attention: str
    """Name of the attention backend in use."""
    num_parameters: int
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
    """By name, for what a request does not name."""
    weights: str = ""
    """`checkpoint.fingerprint` of what was loaded; empty where it is not known."""

    def with_end_token(self, token_id: int | None) -> "ModelInfo":
        """The same where outputs end with this token, too; one outside the vocabulary cannot be drawn."""
        if token_id is None or token_id in self.eos_token_ids or not 0 <= token_id < self.vocab_size:
            return self
        return replace(self, eos_token_ids=[*self.eos_token_ids, token_id])


class AdapterLoader(Protocol):
    """The part of a runner that reads LoRA adapters."""

    def load_lora(self, version: int, request: LoRARequest) -> None:
        """Read an adapter and keep it as `version`. Called in a thread of its own while steps are computed.

        Raises:
            LoRAError: it cannot be served; every problem is named.
        """

    def unload_lora(self, version: int) -> None:
        """Forget a version; no request uses it any more. From any thread."""


class ModelRunner(AdapterLoader, Protocol):
    """A device's way to run a model. Made by `headrace_engine.runner.loader.create_runner`."""

    def load_model(self) -> ModelInfo: ...

    def capabilities(self) -> RunnerCapabilities: ...

    def kv_spec(self) -> KVSpec: ...

    def init_kv_cache(self, num_blocks: int) -> None: ...

    def warm_up(self) -> None: ...

    def execute_model(self, batch: StepBatch) -> StepOutput: ...

    def shutdown(self) -> None: ...


class LaunchedStep(Protocol):
    """A step that a device computes."""

    @property
    def is_complete(self) -> bool:
        """Whether the runner had to wait for the step's tokens, so that nothing is gained by leaving them there.

        A step with errors, grammars or prompt log-probabilities is: the scheduler goes on from these.
        """

    def result(self) -> StepOutput:
        """Wait for the tokens."""


class LaunchingRunner(ModelRunner, Protocol):
    """A runner whose device is given a step while it still computes the one before it.

    Such a step may hold the token that the step before draws for a request: it counts as known, the runner takes it
    from where it was drawn. Drafts do not go with that. Results are asked for in the order of the steps, and that of a
    step before the next but one is launched.
    """

    def launch_model(self, batch: StepBatch) -> LaunchedStep: ...
