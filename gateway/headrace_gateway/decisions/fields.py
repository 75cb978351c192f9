"""Reads the body of a decision, and writes its answer."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace_broker import RegisteredModel
from headrace_broker.decisions import Decided
from headrace_gateway.decisions.parts import plain_items, plain_questions
from headrace_gateway.pooling.pooling_body import LOWEST_PRIORITY, BodyFields, PoolingApi, PoolingBody
from headrace_gateway.requests.field_rules import RULES as FIELD_RULES
from headrace_gateway.requests.problems import Problems
from headrace_gateway.responses.input_items import Item, messages_of, read_items
from headrace_wire.questions import QUESTIONS, decide_problems
from headrace_wire.rules import Anything, Integer, Rule

RULES: Final[Mapping[str, Rule]] = {
    "input": Anything(),
    "questions": QUESTIONS,
    "prompt_cache_key": FIELD_RULES["prompt_cache_key"],
    "prompt_cache_options": Anything(),
    "safety_identifier": Anything(),
    "priority": Integer(0, LOWEST_PRIORITY),
}
REFUSED: Final = {
    "messages": "send them in input",
    "state": "send it in input",
    "lora": "give the adapter's name as model",
}


def read_decision(body: Mapping[str, Any], *, model: RegisteredModel, lora: str | None = None) -> PoolingBody:
    """Check the body. Raises ApiError that lists every problem."""
    problems = Problems()
    questions = plain_questions(body.get("questions"), problems)
    fields = BodyFields({**body, "questions": questions}, RULES, REFUSED, problems)
    given: dict[str, Any] = {} if questions is None else {"questions": questions}
    about = fields.given.get("input")
    if isinstance(about, str):
        given["input"] = about
    elif about is not None:
        items = read_items(plain_items(about, problems), problems)
        _check_calls(items, problems)
        given["input"] = messages_of(items, knows_developer=model.template.developer)
    problems.of_queue(decide_problems(given), {"input": "input", "questions": "questions"})
    problems.raise_any()
    return PoolingBody(
        fields.given.get("model", model.name),
        "decide",
        given,
        write_decision,
        options={"lora": lora, "prefix_key": fields.get("prompt_cache_key") or None},
        priority=fields.get("priority"),
        ignored=problems.ignored,
    )


def _check_calls(items: Sequence[Item], problems: Problems) -> None:
    """Add a problem for each output without a call before it."""
    known: set[str] = set()
    for position, item in enumerate(items):
        if item["type"] == "function_call":
            known.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in known:
            path = f"input[{position}].call_id"
            problems.add(path, f"{path} must be the call_id of an earlier call, got {item['call_id'][:64]!r}")


def write_decision(body: PoolingBody, decided: Decided, _answer_id: str) -> dict[str, Any]:
    """Return the answer, in the order of the questions."""
    usage = decided.usage
    return {
        "model": body.model,
        "answers": decided.answers,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


DECISIONS: Final = PoolingApi("decision-", "decide", read_decision, takes_adapters=True)
