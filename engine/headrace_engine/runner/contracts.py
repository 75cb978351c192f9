"""The interface between the core and the runner of a model.

A runner takes a `StepBatch` and returns a `StepOutput`. Both are plain data: ids and numbers. Imports no torch, so that
tests of the scheduler take milliseconds.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.pooling_request import PoolingCoreRequest, PoolingTask
from headrace_engine.requests.sampling_params import SamplingParams

DRAWS: Final = "headrace-1"
"""Version of the sampling algorithm of all runners. The same logits, seed and position give the same token.

Increase the number with any change of `rng.py` or `sampler.py` that gives another token. A request that a new worker
continues for an old one may then get other tokens. Metrics count such requests.
"""
TokenLogprobs = list[tuple[int, float, int]]
"""For one generated token: (token id, log-probability, rank from 1). The sampled token is the first entry."""


@dataclass(slots=True, kw_only=True)
class NewRequest:
    """A request that the runner does not know, because it is new or was preempted. Sent whole."""

    request_id: str
    token_ids: list[int]
    """The prompt and all output so far."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    suppressed_token_ids: list[int]
    """End and stop tokens, which the sampler must not draw before `sampling_params.min_tokens`."""
    block_ids: list[int]
    num_computed_tokens: int
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    """Token sequences. The last token of a sequence must not be drawn after the tokens before it."""
    num_prompt_logprobs: int | None = None
    """How many prompt log-probabilities the core has already. None: it wants none."""
    lora_version: int | None = None
    """The adapter of the request, as given to `load_lora`."""
    state_slot: int | None = None
    """Where its recurrent layers keep their states. None: the model has no such layers."""
    state_source: int | None = None
    """The slot from which the states are copied to `state_slot` first. None: there are no tokens before this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshot:
    """A copy of the states of a request's recurrent layers."""

    num_tokens: int
    """After how many tokens of the request. At a block border, within the tokens of the step."""
    slot: int
    """Where the copy goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBitmask:
    """Which tokens the grammars of a step's requests allow."""

    masks: dict[str, list[bytes]]
    """Request id -> masks for the next token and for the token after each draft token.

    Bit i of byte j stands for token 8 j + i. Tokens beyond the end of a mask are not allowed. A mask excludes the
    `suppressed_token_ids` already, so the runner does not apply them. A request without an entry is not restricted.
    """


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """One step. A known request appears as deltas only: the number of tokens, and new blocks.

    The runner keeps the tokens of a request, appends those that it samples, and counts computed tokens itself. A
    request yields a token in this step exactly if its scheduled tokens include the last known one. A token counts as
    known as soon as the step that draws it is launched.

    With drafts, the scheduled tokens are the last known token and the drafts after it. The runner draws a token at each
    of these positions until one differs from the draft, or the drafts end. That token is the last one of the step. K/V
    of rejected drafts do not count as computed, and are written again.

    The states of recurrent layers are copied from `NewRequest.state_source` in the order of `new_requests`, before
    anything else. Snapshots are written while the tokens are computed, so no request of the same step may start from
    them.

    Within a layer, K/V of all scheduled tokens are written before any token attends. So a request may read blocks that
    another request fills in the same step.
    """

    num_scheduled_tokens: dict[str, int]
    """Request id -> number of tokens to compute, at least 1. In the order of the batch."""
    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    """Blocks to append to the block tables of known requests."""
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Drafts of known requests. They are included in `num_scheduled_tokens`."""
    state_snapshots: dict[str, list[StateSnapshot]] = field(default_factory=dict)
    """Request id -> the snapshots to take of its recurrent states, in the order of its tokens."""
    removed_request_ids: list[str] = field(default_factory=list)
    """Requests to forget first: they were finished, aborted or preempted since the last step."""
    grammar_bitmask: "Future[GrammarBitmask] | None" = None
    """Masks that are computed in parallel with the model. Wait for them before sampling. None in most steps."""

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(slots=True, kw_only=True)
class StepOutput:
    sampled_token_ids: dict[str, list[int]]
    """Request id -> tokens sampled in this step. Prompts that are not complete have no entry."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """One entry for each sampled token, only for requests that asked for them."""
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """The drafts of the runner's draft model after the sampled tokens. Empty without a draft model."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities of the prompt tokens after the tokens computed in this step, except those that the core has
    already. Only for requests that asked for them."""
    void_request_ids: list[str] = field(default_factory=list)
    """Requests whose token differs from the one that the next step, already launched, has used. The next step yields no
    token for them. The scheduler schedules their token again."""
    errors: dict[str, str] = field(default_factory=dict)
    """Requests for which no token could be chosen -> the reason. The scheduler ends these requests only."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent in prepare, forward and sample."""
    num_padded_tokens: int = 0
    """Tokens computed only to fill a static shape."""
    compiled_graphs: int = 0
    """Number of graphs compiled since the start."""
    fallback_operators: int = 0
    """Number of kinds of operators that ran on the CPU instead of the device since the start."""
    warm_up_seconds: float = 0.0
    """Seconds of compilation before the first request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerCapabilities:
    """What a runner can do in one step. The scheduler keeps to these limits, so all devices share one scheduler."""

    mixed_batches: bool = True
    """Prefill and decode may share a step."""
    max_prefills_per_step: int | None = None
    chunk_sizes: Sequence[int] | None = None
    """Allowed lengths of prefill chunks in tokens; the runner pads shorter chunks. None means any."""
    max_batch: int | None = None
    """Maximum number of requests in one step."""
    logits_of_every_token: bool = True
    """False: the runner returns only the logits of a request's last token. The scheduler then computes prompts with
    log-probabilities token by token."""
    verifies_drafts: bool = False
    """The runner can draw at several positions of a request in one step (`StepBatch.draft_token_ids`)."""
    lora: bool = False
    """Each request of a step may use a different adapter. Needs `mixed_batches`."""
    launches_ahead: bool = False
    """The runner is a `LaunchingRunner`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """The size of a KV block and the memory for blocks. Block 0 is the null block and is never allocated."""

    block_size: int
    """Tokens per block."""
    bytes_per_block: int
    """Keys and values of all layers."""
    default_memory: int
    """Bytes that the runner suggests if the operator sets no limit."""
    available_memory: int | None
    """Bytes that are free after the weights were loaded. None: unknown."""
    bytes_per_state: int = 0
    """The states of all recurrent layers of one request. 0: the model has no such layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """What the clients of the core must know about a model that computes one row of numbers for each input."""

    tasks: tuple[PoolingTask, ...]
    """The tasks that the model serves. A model with one label serves `score` and `classify`."""
    dimensions: int
    """Length of a row: of the embedding, or the number of labels. 1 for `score`."""
    max_input_tokens: int
    """Tokens of one input, with special tokens."""
    labels: tuple[str, ...] = ()
    """Names of the classes, in the order of the row."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """Lengths to which a caller may cut an embedding. Empty: see `takes_any_dimensions`."""
    takes_any_dimensions: bool = False
    """Whether a caller may cut an embedding to any length."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Name of a prompt -> the text before each input."""
    default_prompt_name: str | None = None
    pools_prompt: bool = True
    """Whether the prompt's tokens are part of the pooling."""
    renders_pairs: bool = False
    """Whether a pair is rendered by the chat template, with the roles query and document."""
    max_step_tokens: int = 1024
    """Tokens of a step, unless one input has more."""
    batch_invariant: bool = False
    """Whether the row of an input has the same bytes whatever else a step computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the clients of the core must know about a loaded model."""

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
    """Name of a sampling parameter -> its value in requests that do not set it."""
    weights: str = ""
    """`checkpoint.fingerprint` of the loaded weights. Empty if unknown."""
    pooling: PoolingInfo | None = None
    """None for a model that generates."""

    @classmethod
    def from_wire(cls, values: dict[str, Any]) -> "ModelInfo":
        """Return the information from the map that `dataclasses.asdict` made of it."""
        pooling: dict[str, Any] | None = values.get("pooling")
        if pooling is None:
            return cls(**values)
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in pooling.items()
        }
        return cls(**{**values, "pooling": PoolingInfo(**given)})

    def with_end_token(self, token_id: int | None) -> "ModelInfo":
        """Return a copy in which this token ends outputs too. A token outside the vocabulary is ignored."""
        if token_id is None or token_id in self.eos_token_ids or not 0 <= token_id < self.vocab_size:
            return self
        return replace(self, eos_token_ids=[*self.eos_token_ids, token_id])


class AdapterLoader(Protocol):
    """The part of a runner that reads LoRA adapters."""

    def load_lora(self, version: int, request: LoRARequest) -> None:
        """Read an adapter and keep it as `version`. Called from another thread while steps are computed.

        Raises:
            LoRAError: the adapter cannot be served. The error names every problem.
        """

    def unload_lora(self, version: int) -> None:
        """Forget a version that no request uses any more. Called from any thread."""


class ModelRunner(AdapterLoader, Protocol):
    """Runs a model on a device. Created by `headrace_engine.runner.loader.create_runner`."""

    def load_model(self) -> ModelInfo: ...

    def capabilities(self) -> RunnerCapabilities: ...

    def kv_spec(self) -> KVSpec: ...

    def init_kv_cache(self, num_blocks: int, num_states: int) -> None:
        """Allocate blocks for keys and values, and slots for the states of recurrent layers."""

    def warm_up(self) -> None: ...

    def execute_model(self, batch: StepBatch) -> StepOutput: ...

    def shutdown(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class PoolingInput:
    """The tokens of one text, or of one pair of texts."""

    token_ids: list[int]
    second_from: int = 0
    """Index of the first token of type 1. 0: all tokens have type 0."""
    pooled_from: int = 0
    """Index of the first token that is pooled."""


@dataclass(slots=True, kw_only=True)
class PoolingBatch:
    """The inputs of one step of a pooling model."""

    requests: list[tuple[PoolingCoreRequest, list[int]]]
    """Each request with the indices of its inputs in this step."""

    def inputs(self) -> list[PoolingInput]:
        """Return the inputs of all requests in their order."""
        return [
            PoolingInput(
                token_ids=request.inputs[index],
                second_from=request.second_from[index] if request.second_from else 0,
                pooled_from=request.num_prompt_tokens,
            )
            for request, indices in self.requests
            for index in indices
        ]

    @property
    def num_tokens(self) -> int:
        return sum(len(request.inputs[index]) for request, indices in self.requests for index in indices)


class PoolingRunner(Protocol):
    """Computes rows of numbers. Created by `headrace_engine.runner.loader.create_pooling_runner`."""

    def load_model(self) -> ModelInfo:
        """Load the model. `ModelInfo.pooling` of the result is set."""

    def compute(self, batch: PoolingBatch) -> list[bytes | None]:
        """Return the row of each input, in the order of the batch: little-endian float32.

        None: the row has a number that is not finite.
        """

    def shutdown(self) -> None: ...


class LaunchedStep(Protocol):
    """A step that was launched on a device."""

    @property
    def is_complete(self) -> bool:
        """Whether the runner has the results already, so that the scheduler should take them before the next step.

        True for steps with errors, grammars or prompt log-probabilities, because the next step depends on these.
        """

    def result(self) -> StepOutput:
        """Wait for the tokens and return the results."""


class LaunchingRunner(ModelRunner, Protocol):
    """A runner that launches a step while the device computes the previous one.

    A step may include the token that the previous step draws for a request. The token counts as known, and the runner
    reads it on the device. Drafts are not possible then. The core takes results in the order of the steps: those of
    step n before it launches step n + 2.
    """

    def launch_model(self, batch: StepBatch) -> LaunchedStep: ...
