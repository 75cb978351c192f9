"""The client snippets in README.md and docs, each with the command that installs its packages."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_SNIPPET = re.compile(r"<!-- client: (?P<install>.+?) -->\n```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)
_URL = "redis://127.0.0.1:6379/0"
_GATEWAY_URL = "http://127.0.0.1:8000"
_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Snippet:
    """One snippet as its page shows it."""

    where: str
    install: str
    language: str
    code: str

    def code_for(self, url: str, gateway_url: str, model: str) -> str:
        """Return the code with the addresses and the model of a test."""
        assert _URL in self.code or _GATEWAY_URL in self.code, f"{self.where}: must have {_URL} or {_GATEWAY_URL}"
        return self.code.replace(_URL, url).replace(_GATEWAY_URL, gateway_url).replace(_MODEL, model)


def snippets() -> list[Snippet]:
    """Return all snippets in the order of their pages. A Python snippet without imports continues the one before."""
    found: list[Snippet] = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        name = path.relative_to(ROOT)
        for number, match in enumerate(_SNIPPET.finditer(path.read_text(encoding="utf-8")), 1):
            found.append(Snippet(f"{name}, snippet {number}", match["install"], match["language"], match["code"]))
    return found


def commands() -> list[str]:
    """Return the `celery` commands of docs/enqueue.md."""
    text = (ROOT / "docs" / "enqueue.md").read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(rf"^celery -b {re.escape(_URL)} .*$", text, re.MULTILINE)
