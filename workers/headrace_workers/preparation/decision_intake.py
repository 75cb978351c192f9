"""Checks the messages of `headrace.decide`, as `intake.py` does those of generations."""

from dataclasses import dataclass, field
from typing import Any

from headrace_broker.decisions import DecideRequest
from headrace_engine.api.decide import checked_plan
from headrace_engine.api.input_processor import InputProcessor
from headrace_engine.text.decision_plan import DecisionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDecision:
    """A decision that is checked and tokenised; plain data. The last attributes are those of `Prepared`."""

    questions: list[dict[str, Any]]
    shared: list[int]
    tails: list[list[int]]
    labels: list[list[list[int]]]
    """The fields of a `DecisionPlan`."""
    lora: str | None
    given_numbers: dict[str, float] = field(default_factory=dict)
    is_chat: bool = False
    prompt_tail: None = None

    @property
    def plan(self) -> DecisionPlan:
        return DecisionPlan(self.shared, self.tails, self.labels)

    @property
    def num_choices(self) -> int:
        return len(self.plan.readings())

    @property
    def num_tokens(self) -> int:
        return self.plan.num_tokens


def prepare_decision(request: DecideRequest, processor: InputProcessor) -> PreparedDecision:
    """Tokenise a decision. Raises InvalidRequestError."""
    plan = checked_plan(processor, request.messages, request.questions)
    return PreparedDecision(
        questions=request.questions, shared=plan.shared, tails=plan.tails, labels=plan.labels, lora=request.lora
    )
