"""Lists of stored objects with OpenAI's pagination."""

from collections.abc import Sequence
from typing import Any

from headrace_gateway.errors import invalid


def read_limit(text: str | None, default: int, most: int) -> int:
    """Parse `limit` of a query. Raises ApiError 400."""
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise invalid(f"limit must be an integer from 1 to {most}, not {text[:20]!r}", param="limit")
    return int(text)


def object_list(shapes: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return one page of a list."""
    ids = [shape["id"] for shape in shapes] or [None]
    return {"object": "list", "data": list(shapes), "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
