"""Token counts in OpenAI's format."""

from typing import Any

from headrace_broker import Usage


def usage_shape(
    prompt_tokens: int, completion_tokens: int, *, cached_tokens: int | None = None, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        shape["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if reasoning_tokens is not None:
        shape["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return shape


def final_usage(usage: Usage, *, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Return the usage at the end of one request."""
    return usage_shape(
        usage.prompt_tokens,
        usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=reasoning_tokens,
    )
