"""Error codes and reasons are declared once, and are the same in the code, in metrics and in the docs."""

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

import headrace_broker
from headrace_broker.queue.dead_letters import DeadLetter
from headrace_engine import errors as engine_errors
from headrace_monitoring.labels import OTHER, REFUSALS, RESTART_REASONS, RETURN_REASONS, dead_letter_reason
from headrace_wire.codes import (
    DEAD_LETTER_LABELS,
    BatchCode,
    ConnectionCode,
    DeadLetterReason,
    ErrorCode,
    GatewayCode,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = [path for path in sorted(ROOT.glob("*/headrace_*/**/*.py")) if path.name != "codes.py"]
CODES = (ErrorCode, GatewayCode, ConnectionCode, BatchCode)
WORDS = {"cancelled", "expired", "stopping", "dead_letter"}
"""Codes that are other things as well, such as states: they are allowed where no code stands."""
WITH_CODE = {"ApiError": 2, "ErrorInfo": 0, "RefusedError": 0, "error_answer": 0, "LineProblem": 1, "unanswered": 0}
"""Functions that take a code, and its position."""


def codes_of(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that are error codes."""
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        yield from (keyword.value for keyword in node.keywords if keyword.arg == "code")
        if name in WITH_CODE:
            yield from node.args[WITH_CODE[name] :][:1]
    elif isinstance(node, ast.Compare) and getattr(node.left, "attr", getattr(node.left, "id", "")) == "code":
        yield from node.comparators
    elif isinstance(node, ast.Dict):
        yield from (value for key, value in zip(node.keys, node.values, strict=True) if is_text(key, "code"))


def is_text(node: ast.AST | None, *texts: str) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and (not texts or node.value in texts)


def test_no_error_code_is_written_out() -> None:
    declared = {*chain.from_iterable(CODES)}
    places = 0
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = list(codes_of(node))
            places += len(found)
            assert not any(map(is_text, found)), f"{path}:{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]
            assert not is_text(node, *declared - WORDS), f"{path}:{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]
    assert places > 100


def test_every_error_code_is_used() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    used = set(re.findall(r"\b((?:Error|Gateway|Connection|Batch)Code\.[A-Z_]+)\b", text))
    assert used == {f"{kind.__name__}.{code.name}" for kind in CODES for code in kind}


def test_the_engines_errors_have_codes_of_a_request() -> None:
    kinds = [kind for kind in vars(engine_errors).values() if hasattr(kind, "code")]
    assert engine_errors.InvalidRequestError in kinds
    assert {kind.code for kind in kinds} <= set(ErrorCode)


def test_the_wire_format_names_every_error_code_and_no_other() -> None:
    text = (DOCS / "wire.md").read_text(encoding="utf-8")
    [table] = re.findall(r"\nA refused request is .*?\n\n((?:\|.*\n)+)", text)
    rows = [code for row in table.splitlines() for code in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(rows) == sorted(ErrorCode)


@pytest.mark.parametrize("code", [*ErrorCode, *GatewayCode, *ConnectionCode])
def test_the_gateways_page_has_a_row_for_every_code(code: str) -> None:
    text = (DOCS / "gateway.md").read_text(encoding="utf-8")
    [table] = re.findall(r"\n## Errors and headers\n(?:[^|].*\n|\n)+((?:\|.*\n)+)", text)
    assert f"`{code}`" in table


@pytest.mark.parametrize("code", BatchCode)
def test_the_batch_page_names_every_code_of_a_line(code: str) -> None:
    assert f"`{code}`" in (DOCS / "batch.md").read_text(encoding="utf-8")


def test_every_code_of_a_response_has_a_series_of_refusals() -> None:
    assert {*ErrorCode, *GatewayCode, OTHER} == set(REFUSALS)


def test_every_reason_for_a_dead_letter_is_used() -> None:
    lua = "".join(path.read_text() for path in (Path(headrace_broker.__file__).parent / "lua").glob("*.lua"))
    of_scripts = set(re.findall(r"\bDEAD_([A-Z_]+)\b", lua)) - {"LETTERS", "LETTERS_KEPT"}
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    in_code = set(re.findall(r"\bDeadLetterReason\.([A-Z_]+)\b", text))
    assert in_code | of_scripts == set(DeadLetterReason.__members__)
    assert not re.search(rf"'(?:{'|'.join(DeadLetterReason)})\b", lua)


@pytest.mark.parametrize("reason", DeadLetterReason)
def test_a_dead_letter_is_counted_under_its_own_reason(reason: DeadLetterReason) -> None:
    assert dead_letter_reason(DeadLetter(reason, "headrace.m", 0, b"").reason) == reason.label
    assert dead_letter_reason(reason.saying("8388609 bytes")) == reason.label


def listed(metric: str) -> list[str]:
    """The values of the label `reason` in the table of docs/monitoring.md."""
    text = (DOCS / "monitoring.md").read_text(encoding="utf-8")
    [values] = re.findall(rf"\| `{metric}` \| counter \| reason: ([\w, ]+) \|", text)
    return values.split(", ")


def test_the_docs_list_the_labels() -> None:
    assert listed("headrace_queue_dead_lettered_messages_total") == [*DEAD_LETTER_LABELS, OTHER]
    assert listed("headrace_queue_returned_messages_total") == [*RETURN_REASONS]
    assert listed("headrace_engine_restarts_total") == [*RESTART_REASONS, OTHER]


def test_the_runbook_names_every_reason() -> None:
    text = (DOCS / "runbooks" / "dead-letters.md").read_text(encoding="utf-8")
    assert {label for label in DEAD_LETTER_LABELS if f"`{label}`" not in text} == set()
