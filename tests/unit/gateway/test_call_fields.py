"""What a body of nothing but faults costs."""

import difflib
from typing import Any

import pytest

from headrace_gateway import call_fields
from headrace_gateway.chat_fields import read_chat
from headrace_gateway.errors import ApiError


def test_a_body_full_of_unknown_fields_is_not_compared_with_all_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def count(word: str, *rest: Any, **options: Any) -> list[str]:
        compared.append(word)
        return difflib.get_close_matches(word, *rest, **options)

    monkeypatch.setattr(call_fields, "get_close_matches", count)
    body = {f"temperaturf{number}": 1 for number in range(1000)}
    with pytest.raises(ApiError, match=r"do you mean temperature.* and 9[0-9]+ problems more"):
        read_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], **body}, model=None, lora=None)
    assert len(compared) < 10
