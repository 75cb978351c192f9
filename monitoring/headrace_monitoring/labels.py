"""The closed sets of label values.

A label value never comes from a request. Each set is known at the start, so all series of a family exist from the first
scrape on, and `increase()` counts the first event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from headrace_wire.codes import (
    DEAD_LETTER_LABELS,
    PRIORITY_STEPS,
    EngineDeathCause,
    ErrorCode,
    GatewayCode,
    ReturnReason,
)

StepKind = Literal["prefill", "decode", "mixed"]
WorkerState = Literal["loading", "ready", "draining"]

STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)
WORKER_STATES: tuple[WorkerState, ...] = get_args(WorkerState)

STEP_PHASES = ("schedule", "prepare", "forward", "sample", "draft", "update")
DRAFT_POSITIONS = tuple(str(position) for position in range(1, 17))
"""Positions in a draft of speculative decoding. The last is the engine's limit on a draft's length."""
CLOCKS = ("producer", "redis", "none")
"""The clock that measured the wait of a message: the producer's, Redis's, or none."""
MESSAGE_STATES = ("ready", "unacked", "dead")
ENGINE_REQUEST_STATES = ("running", "waiting")
BLOCK_STATES = ("used", "cached", "free")
SLOT_STATES = ("used", "free")
PROMPT_SOURCES = ("computed", "cached")
TENANT_TOKENS = ("prompt", "generated")
RETURN_REASONS: tuple[ReturnReason, ...] = get_args(ReturnReason)
RESTART_REASONS: tuple[EngineDeathCause, ...] = get_args(EngineDeathCause)
REDIS_COMMANDS = ("claim", "publish", "depth")
RESULT_PHASES = ("detokenize", "publish")

Endpoint = Literal[
    "chat_completions",
    "completions",
    "responses",
    "messages",
    "embeddings",
    "rerank",
    "score",
    "classify",
    "decisions",
    "tokenizer",
    "models",
    "files",
    "batches",
    "operations",
    "page",
    "probes",
    "other",
]
Rejoin = Literal["start", "cursor"]
WebhookOutcome = Literal["delivered", "failed", "given_up"]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)
REJOINS: tuple[Rejoin, ...] = get_args(Rejoin)
RESPONSE_ENDS = ("completed", "incomplete", "failed", "cancelled")
WEBHOOK_OUTCOMES: tuple[WebhookOutcome, ...] = get_args(WebhookOutcome)
BatchLineOutcome = Literal["completed", "failed", "cancelled", "expired"]
BATCH_LINE_OUTCOMES: tuple[BatchLineOutcome, ...] = get_args(BatchLineOutcome)
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx", "none")

# Counts values outside their set, so that an unknown reason adds no series.
OTHER = "other"
# The tenant of requests that name none.
NO_TENANT = "none"
REFUSALS = (*ErrorCode, *GatewayCode, OTHER)
"""Codes of the gateway's errors."""
MAX_TENANTS = 200
"""Each tenant adds 19 series to each worker."""


@dataclass(frozen=True)
class LabelSets:
    """The label sets that the operator defines.

    `tenants` and LoRA `adapters` have a series each. All others share the series "other".
    """

    tenants: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()

    @property
    def tenant_values(self) -> tuple[str, ...]:
        return (*self.tenants, OTHER, NO_TENANT)


def priority_step(priority: int) -> int:
    """Return the priority step of a priority: the largest step number that is at most `priority`."""
    return max((step for step in PRIORITY_STEPS if step <= priority), default=PRIORITY_STEPS[0])


def dead_letter_reason(reason: str) -> str:
    """Return the label value of a reason: its part before the colon, or "other" if that is unknown."""
    word = reason.partition(":")[0].replace(" ", "_")
    return word if word in DEAD_LETTER_LABELS else OTHER
