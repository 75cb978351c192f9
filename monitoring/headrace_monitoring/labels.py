"""The closed sets of label values.

A label value never comes from a request: each set below is known before the first observation, so every child of a
family exists from the first scrape on and `increase()` sees the first event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal["stop", "length", "cancelled", "expired", "error", "rejected"]
StepKind = Literal["prefill", "decode", "mixed"]
WorkerState = Literal["loading", "ready", "draining"]

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)
WORKER_STATES: tuple[WorkerState, ...] = get_args(WorkerState)

STEP_PHASES = ("schedule", "prepare", "forward", "sample", "draft", "update")
DRAFT_POSITIONS = tuple(str(position) for position in range(1, 17))
"""Places in a draft of speculative decoding; the engine's limit on a draft's length is the last one."""
CLOCKS = ("producer", "redis", "none")
"""What told how long a message had waited: its producer's clock, Redis's, or nothing."""
MESSAGE_STATES = ("ready", "unacked", "dead")
ENGINE_REQUEST_STATES = ("running", "waiting")
BLOCK_STATES = ("used", "cached", "free")
SLOT_STATES = ("used", "free")
PROMPT_SOURCES = ("computed", "cached")
TENANT_TOKENS = ("prompt", "generated")
RETURN_REASONS = (
    "not_ready",
    "redis",
    "drain",
    "cleared",
    "preempted",
    "engine_given_up",
    "stream_refused",
    "fenced",
    "rolled_back",
    "result_not_stored",
)
"""Why a worker gives a message back. The first five are the fleet's own doing; the others count as a delivery."""
RESULT_PHASES = ("detokenize", "publish")

Endpoint = Literal[
    "chat_completions",
    "completions",
    "responses",
    "messages",
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
WebhookOutcome = Literal["delivered", "failed", "given_up", "gone"]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)
REJOINS: tuple[Rejoin, ...] = get_args(Rejoin)
RESPONSE_ENDS = ("completed", "incomplete", "failed", "cancelled")
WEBHOOK_OUTCOMES: tuple[WebhookOutcome, ...] = get_args(WebhookOutcome)
BatchLineOutcome = Literal["completed", "failed", "cancelled", "expired"]
BATCH_LINE_OUTCOMES: tuple[BatchLineOutcome, ...] = get_args(BatchLineOutcome)
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx", "none")

# where a value outside its set is counted: a new reason must not become a new series
OTHER = "other"
# of a request that names no tenant
NO_TENANT = "none"
REFUSALS = (
    "invalid_request",
    "invalid_json",
    "unsupported",
    "unsupported_parameter",
    "context_length_exceeded",
    "invalid_api_key",
    "model_not_found",
    "not_found",
    "method_not_allowed",
    "admin_key_required",
    "host_not_allowed",
    "origin_not_allowed",
    "request_too_large",
    "unsupported_media_type",
    "idempotency_key_reused",
    "rate_limit_exceeded",
    "queue_full",
    "too_many_readers",
    "quota_exceeded",
    "queue_unavailable",
    "engine_error",
    "dead_letter",
    "model_changed",
    "cancelled",
    "expired",
    "internal_error",
    "stopping",
    "other_release",
    "tokenizer_unavailable",
    "no_files",
    "invalid_form",
    "unsupported_value",
    "not_cancellable",
    "storage_full",
    "storage_unavailable",
    "storage_limit_exceeded",
    "too_many_batches",
    "upload_timeout",
    "invalid_cursor",
    "stream_expired",
    "response_too_large",
    "previous_response_not_found",
    "previous_response_not_finished",
    "not_in_background",
    "item_not_found",
    OTHER,
)
"""Codes of the gateway's errors."""
MAX_TENANTS = 200
"""Each tenant is 19 series of every worker."""


@dataclass(frozen=True)
class LabelSets:
    """The sets whose words belong to the broker, the workers and the operator, which may pass their own.

    `tenants` and LoRA `adapters` are those that get series of their own; the requests of all others count as "other"
    together.
    """

    priority_steps: tuple[int, ...] = (0, 3, 6, 9)
    dead_letter_reasons: tuple[str, ...] = ()
    """Those of the broker, with underscores."""
    restart_reasons: tuple[str, ...] = ("crash", "stall", "out_of_memory", "recompilation")
    redis_commands: tuple[str, ...] = ("claim", "publish", "depth")
    tenants: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()

    @property
    def tenant_values(self) -> tuple[str, ...]:
        return (*self.tenants, OTHER, NO_TENANT)

    def priority_step(self, priority: int) -> int:
        """The queue list a priority lands in: the highest step not above it."""
        return max((step for step in self.priority_steps if step <= priority), default=self.priority_steps[0])

    def dead_letter_reason(self, reason: str) -> str:
        """The label value of a reason: of "undecodable: ValueError" the word before the colon, or "other"."""
        word = reason.partition(":")[0].replace(" ", "_")
        return word if word in self.dead_letter_reasons else OTHER
