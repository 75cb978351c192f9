"""Reasons and error codes are the same in the code, in metrics and in the docs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import headrace_broker
import headrace_workers
from headrace_broker.dead_letters import DeadLetter
from headrace_broker.reasons import DEAD_LETTER_LABELS, DeadLetterReason, ErrorCode
from headrace_engine import errors as engine_errors
from headrace_monitoring.labels import OTHER, REFUSALS, RETURN_REASONS, LabelSets
from headrace_workers.supervisor import DeathCause

DOCS = Path(__file__).parents[2] / "docs"
SOURCES = [
    path
    for package in (headrace_broker, headrace_workers)
    for path in Path(str(package.__file__)).parent.rglob("*.py")
    if path.name != "reasons.py"
]


def calls(*names: str) -> Iterator[ast.Call]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                yield node


def members_used(enum: str, *suffixes: str) -> set[str]:
    texts = [path.read_text(encoding="utf-8") for path in SOURCES if path.suffix in suffixes]
    return {name for text in texts for name in re.findall(rf"\b{enum}\.([A-Z_]+)\b", text)}


def test_no_error_has_a_code_that_is_written_out() -> None:
    found = list(calls("ErrorInfo", "RefusedError", "error_answer"))
    assert len(found) > 15
    assert [ast.unparse(call) for call in found if call.args and isinstance(call.args[0], ast.Constant)] == []


def test_every_error_code_is_sent_by_somebody() -> None:
    of_engine = {kind.code for kind in vars(engine_errors).values() if hasattr(kind, "code")}
    assert of_engine <= set(ErrorCode)
    assert {ErrorCode[name] for name in members_used("ErrorCode", ".py")} | of_engine == set(ErrorCode)


def test_the_wire_format_names_every_error_code_and_no_other() -> None:
    text = (DOCS / "wire.md").read_text(encoding="utf-8")
    [table] = re.findall(r"\nA refused request is .*?\n\n((?:\|.*\n)+)", text)
    named = [code for row in table.splitlines() for code in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(ErrorCode)


def test_every_error_code_has_a_series_of_refusals() -> None:
    assert set(ErrorCode) <= set(REFUSALS)


@pytest.mark.parametrize("code", [code for code in REFUSALS if code != OTHER])
def test_every_code_of_the_gateway_is_documented(code: str) -> None:
    assert any(f"`{code}`" in path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))


def test_every_reason_for_a_dead_letter_is_used() -> None:
    lua = "".join(path.read_text() for path in (Path(headrace_broker.__file__).parent / "lua").glob("*.lua"))
    of_scripts = set(re.findall(r"\bDEAD_([A-Z_]+)\b", lua)) - {"LETTERS", "LETTERS_KEPT"}
    assert {*members_used("DeadLetterReason", ".py"), *of_scripts} == set(DeadLetterReason.__members__)
    assert not re.search(rf"'(?:{'|'.join(DeadLetterReason)})\b", lua)


@pytest.mark.parametrize("reason", DeadLetterReason)
def test_a_dead_letter_is_counted_under_its_own_reason(reason: DeadLetterReason) -> None:
    sets = LabelSets(dead_letter_reasons=DEAD_LETTER_LABELS)
    assert sets.dead_letter_reason(DeadLetter(reason, "headrace.m", 0, b"").reason) == reason.label
    assert sets.dead_letter_reason(reason.saying("8388609 bytes")) == reason.label


def listed(metric: str) -> list[str]:
    """The values of the label `reason` in the table of docs/monitoring.md."""
    text = (DOCS / "monitoring.md").read_text(encoding="utf-8")
    [values] = re.findall(rf"\| `{metric}` \| counter \| reason: ([\w, ]+) \|", text)
    return values.split(", ")


def test_the_docs_list_the_labels() -> None:
    assert listed("headrace_queue_dead_lettered_messages_total") == [*DEAD_LETTER_LABELS, OTHER]
    assert listed("headrace_queue_returned_messages_total") == [*RETURN_REASONS]
    assert listed("headrace_engine_restarts_total") == [*LabelSets().restart_reasons, OTHER]
    assert set(LabelSets().restart_reasons) == set(get_args(DeathCause))


def test_the_runbook_names_every_reason() -> None:
    text = (DOCS / "runbooks" / "dead-letters.md").read_text(encoding="utf-8")
    assert {label for label in DEAD_LETTER_LABELS if f"`{label}`" not in text} == set()
