"""`background_options` of the Responses API: within which time a response in the background should be complete."""

from collections.abc import Mapping
from typing import Any, Final

from headrace_gateway.requests.problems import Problems
from headrace_wire.values import named, shown

SOONEST: Final = "soonest"
WINDOWS: Final = {SOONEST: None, "2h": 7200, "8h": 28_800}
"""Completion windows, in seconds."""
_NAME: Final = "background_options"
_TIERS: Final = (None, "auto", "default")


def read_window(given: Mapping[str, Any], problems: Problems, *, background: bool, stream: bool) -> int | None:
    """Return the seconds of the completion window, from the request's creation; None for `soonest`."""
    options = given.get(_NAME, {})
    if not isinstance(options, Mapping):
        problems.must(_NAME, "be a map", shown(options))
        return None
    problems.unknown_fields(_NAME, options, ("completion_window", "continuation_id"))
    continuation = options.get("continuation_id")
    if isinstance(continuation, str):
        problems.ignore(f"{_NAME}.continuation_id", f"{_NAME}.continuation_id must be absent: it has no effect")
    elif continuation is not None:
        problems.must(f"{_NAME}.continuation_id", "be a string", shown(continuation))
    name = f"{_NAME}.completion_window"
    window = options.get("completion_window")
    if window is None or window == SOONEST:
        return None
    if not isinstance(window, str) or window not in WINDOWS:
        problems.must(name, f"be one of {', '.join(WINDOWS)}", named(window))
        return None
    if not background:
        problems.add(name, f"{name} {window} requires background: true")
    if stream:
        problems.add(name, f"{name} {window} requires stream: false: retrieve the response by its id")
    if given.get("service_tier") not in _TIERS:
        problems.add(name, f"{name} {window} requires the service_tier auto or default, or none")
    return WINDOWS[window]
