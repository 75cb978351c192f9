"""The project's text says what the field says: the table of coined words is kept out of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_PATH = Path(__file__).parents[2] / "docs" / "plain_words.py"


@pytest.fixture(scope="module")
def plain_words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_words", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(plain_words: ModuleType, path: Path) -> list[tuple[int, str]]:
    return [(line, word) for line, word, _ in plain_words.findings(path)]


def test_no_text_has_a_coined_word(plain_words: ModuleType) -> None:
    assert plain_words.main() == 0


def test_prose_is_looked_at_and_code_is_not(plain_words: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A doorbell\n\n`bury` and [a link](bury.md)\n\n```\nbury\n```\nThe message is\nBuried.\n")
    assert sorted(found(plain_words, page)) == [(1, "doorbell"), (9, "Buried")]
    module = tmp_path / "module.py"
    module.write_text(
        '"""Whoever asks.\n\nGives the news.\n"""\nbury = ":bell"  # a strike\nlog.info(f"{bury} is in debt")\nbury()\n'
    )
    assert sorted(found(plain_words, module)) == [(1, "Whoever"), (3, "news"), (5, "strike"), (6, "debt")]
    script = tmp_path / "script.lua"
    script.write_text("-- The bell.\nlocal key = 'bell' -- rings\nreturn bell\n")
    assert found(plain_words, script) == [(1, "bell")]
    source = tmp_path / "source.c"
    source.write_text("/* One\n   flavour */\nint bell; // whoever\n")
    assert found(plain_words, source) == [(2, "flavour"), (3, "whoever")]
