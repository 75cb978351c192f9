"""Every error code of the gateway is counted under its own label value."""

import ast
from collections.abc import Iterator
from pathlib import Path

import headrace_gateway
from headrace_monitoring.labels import OTHER, REFUSALS

PACKAGE = Path(headrace_gateway.__file__).parent
OF_LINES = {"invalid_custom_id", "invalid_method", "invalid_url", "line_too_large"}
"""Codes that are in the error file of a batch, but in no response."""


def codes() -> Iterator[str]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            named = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            placed = node.args[2:3] if isinstance(node.func, ast.Name) and node.func.id == "ApiError" else []
            for value in (*named, *placed):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def test_every_error_code_has_a_label_value() -> None:
    found = set(codes())
    assert found >= {"invalid_api_key", "unsupported", "storage_full", "stream_expired"}
    assert found - OF_LINES <= set(REFUSALS) - {OTHER}
