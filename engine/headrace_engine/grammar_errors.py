"""What is wrong with a grammar, in words that its sender can act on."""

import re

from headrace_engine.errors import HeadraceEngineError

_MAX_ERROR_CHARS = 300


class GrammarError(HeadraceEngineError):
    """A grammar cannot be compiled, or cannot go on; the sentence says why."""


class DeadEndError(GrammarError):
    """No text satisfies the grammar from here on."""


def sentence(error: str) -> str:
    """The library's words in one line of bounded length."""
    if "NoExtension" in error:
        return "no text satisfies it"
    line = re.sub(r"\s+", " ", error.replace("<non-verbose/>", "")).strip()
    return line if len(line) <= _MAX_ERROR_CHARS else line[:_MAX_ERROR_CHARS] + "..."
