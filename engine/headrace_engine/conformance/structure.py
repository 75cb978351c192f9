"""Structured outputs: outputs of each claimed kind have the required form."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from headrace_engine.conformance.case import Broken, DoesNotApply, case, case_for_each, expect, feature, structured
from headrace_engine.conformance.driver import Answer, EngineUnderTest
from headrace_engine.requests.request import EngineCoreRequest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHOICES = ["the quick brown fox", "the quick red hen", "nothing of it"]
REGEX = "[a-f]{3}(-[a-f]{4}){2}"
GRAMMAR = 'start: "<" WORD "," WORD ("," WORD)? ">"\nWORD: /[a-c]{2,4}/\n'


@dataclass(frozen=True, slots=True)
class Form:
    """A form of one kind, and the check of a text."""

    kind: str
    wanted: dict[str, Any]
    params: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.kind

    def problem(self, text: str) -> str | None:
        """Return what is wrong with a complete text."""
        if self.kind == "choice":
            return None if text in CHOICES else f"{text[:80]!r} is none of the choices"
        if self.kind == "regex":
            return None if re.fullmatch(REGEX, text) else f"{text[:80]!r} does not match {REGEX}"
        if self.kind == "grammar":
            pattern = "<[a-c]{2,4}(,[a-c]{2,4}){1,2}>"
            return None if re.fullmatch(pattern, text) else f"{text[:80]!r} is no text of the grammar"
        try:
            document = json.loads(text)
        except ValueError as error:
            return f"{text[:80]!r} is no JSON: {error}"
        if self.kind == "json_object":
            return None if isinstance(document, dict) else f"{text[:80]!r} is no JSON object"
        return None if _fits_schema(document) else f"{text[:80]!r} does not fit the schema"


FORMS = (
    Form("json", {"json": SCHEMA, "disable_any_whitespace": True}),
    Form("regex", {"regex": REGEX}),
    Form("choice", {"choice": CHOICES}),
    Form("grammar", {"grammar": GRAMMAR}),
    Form("json_object", {"json_object": True, "disable_any_whitespace": True}),
)


@case_for_each(FORMS, lambda form: [structured(form.kind)])
def the_text_has_its_form(engine: EngineUnderTest, form: Form) -> None:
    """structured_outputs {}: greedy and sampled outputs have the form, end with stop, and have no stop_reason."""
    for answer in engine.run(form_request(engine, form), form_request(engine, form, temperature=1.0, seed=5)):
        _expect_form(engine, answer, form)


@case_for_each(FORMS, lambda form: [structured(form.kind)])
def neighbours_do_not_disturb_it(engine: EngineUnderTest, form: Form) -> None:
    """structured_outputs {}: an output is the same beside other forms and beside requests without a form."""
    request = form_request(engine, form)
    alone = engine.run_one(request)
    others = [form_request(engine, other) for other in FORMS if other.kind in engine.capabilities.structured_outputs]
    fillers = [engine.send(r) for r in (*others, engine.request(engine.prompt(12, 3)))]
    together = engine.run_one(engine.again(request))
    engine.finish(*fillers)
    _expect_form(engine, together, form)
    expect(together.tokens == alone.tokens, "the tokens beside others differ from those alone")


@case(feature("structured_outputs"))
def every_claimed_kind_exists(engine: EngineUnderTest) -> None:
    """Each claimed kind of structured outputs can be asked for by a request."""
    unknown = set(engine.capabilities.structured_outputs) - {form.kind for form in FORMS}
    expect(not unknown, f"no request can ask for {', '.join(sorted(unknown))}")


@case(feature("structured_outputs"))
def a_form_that_cannot_be_compiled_is_answered(engine: EngineUnderTest) -> None:
    """A form that cannot be compiled ends its request with an error. The engine and other requests continue."""
    kind = engine.capabilities.structured_outputs[0]
    hopeless = {
        "json": {"json": {"type": "nothing"}},
        "regex": {"regex": "(("},
        "grammar": {"grammar": "start: missing"},
    }
    if kind not in hopeless:
        raise DoesNotApply(f"nothing that is {kind} is known to be hopeless")
    mate = engine.send(engine.request(max_tokens=8))
    answer = engine.run_one(engine.request(structured_outputs=hopeless[kind]))
    expect(answer.end[0] == "error" and answer.error, f"the request ended with {answer.end}, expected an error")
    engine.finish(mate)
    expect(len(mate.tokens) == 8, "the request beside it is not complete")


def form_request(engine: EngineUnderTest, form: Form, **params: Any) -> EngineCoreRequest:
    if not engine.end_tokens:
        raise DoesNotApply("the model has no end token")
    if form.kind == "json_object":
        params = {"logit_bias": _closing_bias(engine), **params}
    wanted = {"max_tokens": 120, "ignore_eos": False, "structured_outputs": form.wanted, **params}
    return engine.request(engine.tokenizer.encode("Answer in this form: "), **wanted)


def _closing_bias(engine: EngineUnderTest) -> dict[int, float]:
    """Return a bias that makes a model without knowledge of JSON close the object soon."""
    limit = engine.capabilities.max_logit_bias
    if limit is not None and limit < 1 + len(engine.end_tokens):
        raise DoesNotApply("max_logit_bias is too small to bring an object to its end")
    closing = [tokens[0] for text in ("}", "{}") if len(tokens := engine.tokenizer.encode(text)) == 1]
    return dict.fromkeys([*closing, *engine.end_tokens][: limit or None], 50.0)


def _expect_form(engine: EngineUnderTest, answer: Answer, form: Form) -> None:
    if answer.error is not None:
        raise Broken(f"the request ended with an error: {answer.error}")
    expect(answer.end == ("stop", None), f"finish_reason and stop_reason are {answer.end}, expected ('stop', None)")
    text = engine.tokenizer.decode([token for token in answer.tokens if token not in engine.end_tokens])
    problem = form.problem(text)
    expect(problem is None, str(problem))


def _fits_schema(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and set(document) == {"name", "age", "tags"}
        and re.fullmatch("[a-z]{0,8}", document["name"]) is not None
        and type(document["age"]) is int
        and 0 <= document["age"] <= 120
        and 2 <= len(document["tags"]) <= 3
        and set(document["tags"]) <= {"a", "b", "c"}
    )
