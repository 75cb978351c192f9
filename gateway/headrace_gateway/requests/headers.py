"""The gateway's own request headers (priority, expiry, abandonment, resumption), and OpenAI's Idempotency-Key."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from headrace_gateway.requests.problems import Problems
from headrace_gateway.settings import GatewaySettings
from headrace_wire.values import named, shown

MAX_KEY_CHARS: Final = 100
LONGEST_EXPIRES: Final = 86_400.0
LONGEST_ABANDON_AFTER: Final = 3600.0
ResumeStyle: TypeAlias = Literal["none", "id", "chunk"]


@dataclass(frozen=True, slots=True)
class CallHeaders:
    """The values of these headers. Times are in seconds."""

    expires: float
    abandon_after: float | None
    priority: int | None = None
    idempotency_key: str | None = None
    resume: ResumeStyle = "none"
    """Where the cursors of a stream are: in `id:` lines, or in the chunks for SDKs that hide those lines."""


def read_headers(headers: Mapping[str, str], settings: GatewaySettings) -> CallHeaders:
    """Parse the headers. Raises ApiError 400 that lists every problem."""
    problems = Problems()
    priority = _number(headers, "x-headrace-priority", 0, 9, problems)
    if priority is not None and priority != int(priority):
        problems.must("x-headrace-priority", "be an integer", f"{priority:g}")
    expires = _number(headers, "x-headrace-expires", 1, LONGEST_EXPIRES, problems)
    abandon_after = _number(headers, "x-headrace-abandon-after", 0, LONGEST_ABANDON_AFTER, problems)
    if abandon_after is None:
        abandon_after = settings.abandon_after
    elif 0 < abandon_after < 1:
        problems.must("x-headrace-abandon-after", "be 0 (never) or at least 1", f"{abandon_after:g}")
    key = headers.get("idempotency-key")
    if key is not None and not (1 <= len(key) <= MAX_KEY_CHARS and key.isprintable()):
        problems.must("idempotency-key", f"be 1 to {MAX_KEY_CHARS} printable characters", shown(key))
    resume = headers.get("x-headrace-resume", "0").lower()
    styles: dict[str, ResumeStyle] = {"0": "none", "1": "id", "id": "id", "chunk": "chunk"}
    if resume not in styles:
        problems.must("x-headrace-resume", "be 0, 1, id or chunk", named(resume))
    problems.raise_any()
    return CallHeaders(
        expires=settings.expires if expires is None else expires,
        abandon_after=abandon_after or None,
        priority=None if priority is None else int(priority),
        idempotency_key=key,
        resume=styles[resume],
    )


def _number(headers: Mapping[str, str], name: str, low: float, high: float, problems: Problems) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        problems.must(name, f"be a number from {low:g} to {high:g}", named(text))
        return None
    return value
