"""Find coined words for which the field has an established word: `python docs/plain_words.py`.

Checks the prose of Markdown pages, the comments, docstrings and other strings of Python files, and the comments of C
and Lua. Names are not checked. The exit status is 1 if a word of the table is found.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTEAD = {
    r"doorbells?|bells?": "wake-up token, blocking wait",
    r"bury|buries|buried|burial|graves?": "dead-letter (a message), fail (a request), reap (a process)",
    r"strikes?|acquit\w*|quarantine\w*": "suspect count, cleared, isolation",
    r"debts?|owed": "pending settlement, retried",
    r"displaces?|displaced": "preempts",
    r"news|lulls?|nobody sleeps": "outputs, step without outputs, idle period",
    r"save up|saves up|credits?": "gather (service), free slots",
    r"(?:hand(?:s|ed|ing)?|g[ia]ves?|giv(?:en|ing)|put(?:s|ting)?)(?: [\w']+){0,2} back": "requeue, return, free",
    r"seats?|lent": "slot, enabled",
    r"in any company": "batch-invariant",
    r"unheard|(?:who|nobody|anybody|whoever) listens|nobody has listened": "subscriber heartbeat, abandoned",
    r"flavours?|followers?": "compiler backend, worker ranks",
    r"whoever|what of it": "name the actor: the client, the worker, the reader",
    r"(?:comes?|came|becomes?|became) of (?:it|them|him|this)": "say what happens",
    r"in (?:its|their|this replica's) hands": "holds, leased, claimed",
    r"keeps? back|kept (?:back|no more|no longer)": "held back, expired",
    r"doors?|desks?|knobs?|announcers?|pumps?": "check of the request, requests in flight, parameters, outbox, task",
    r"go(?:es)? on|went on": "continues",
    r"anew|afresh": "again",
    r"(?:is|are|was|were) told|made no turn|does not turn": "gets, is reported, is blocked",
    r"announcers?|framings?": "publisher, encoder",
}
"""Regular expressions for coined words, and the words to use instead."""
_FOLDERS = (
    "benchmarks",
    "broker",
    "cli",
    "deploy",
    "docs",
    "engine",
    "examples",
    "gateway",
    "monitoring",
    "tests",
    "wire",
    "workers",
)
_LEFT_OUT = (
    "docs/plain_words.py",
    "docs/reference/",  # generated from code, which is checked itself
    "tests/unit/test_plain_words.py",
)
_NOT_PROSE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`|\]\([^)\s]*\)|<!--.*?-->", re.MULTILINE | re.DOTALL)


def files(root: Path = ROOT) -> Iterator[Path]:
    """Find the files to check."""
    found = [*root.glob("*.md"), *(path for name in _FOLDERS for path in (root / name).rglob("*.*"))]
    for path in sorted(path for path in found if path.suffix in _PROSE):
        if not path.relative_to(root).as_posix().startswith(_LEFT_OUT):
            yield path


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the word and the words to use instead, for each coined word of a file."""
    text = path.read_text(encoding="utf-8")
    for first_line, prose in _PROSE[path.suffix](text):
        for words, instead in INSTEAD.items():
            for match in re.finditer(rf"(?<![\w.:/-])(?:{words})(?![\w-]|\.\w|\()", prose, re.IGNORECASE):
                yield first_line + prose.count("\n", 0, match.start()), match[0], instead


def _markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    yield 1, _NOT_PROSE.sub(lambda match: "\n" * match[0].count("\n"), text)


def _python_prose(text: str) -> Iterator[tuple[int, str]]:
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            is_formatted = (
                re.match(r"\w*f", token.string, re.IGNORECASE) is not None
            )  # names in braces, before Python 3.12
            yield token.start[0], re.sub(r"`[^`\n]*`|\{[^{}\n]*\}" if is_formatted else r"`[^`\n]*`", "", token.string)


def _comments(pattern: str, text: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(pattern, text, re.DOTALL):
        yield 1 + text.count("\n", 0, match.start()), re.sub(r"`[^`\n]*`", "", match[0])


_C = partial(_comments, r"/\*.*?\*/|//[^\n]*")
_PROSE: dict[str, Callable[[str], Iterable[tuple[int, str]]]] = {
    ".md": _markdown_prose,
    ".py": _python_prose,
    ".lua": partial(_comments, r"--[^\n]*"),
    ".c": _C,
    ".h": _C,
}


def main() -> int:
    status = 0
    for path in files():
        for line, word, instead in findings(path):
            sys.stderr.write(f"{path.relative_to(ROOT)}:{line}: {word!r}; say: {instead}\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
