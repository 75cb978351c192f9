"""A hook of schemathesis that keeps answers short. It changes a valid number of tokens or choices into a small one."""

from typing import Any

import schemathesis

LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
COUNTS = ("n", "max_tokens", "max_completion_tokens", "max_output_tokens")
MOST = 3
MAX_TOKENS = 2**31 - 1
"""The document's limit. A number above it stays, so that its refusal is checked."""
MAX_N = 64


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    """Make the request short."""
    if case.method.upper() != "POST" or not isinstance(case.body, dict):
        return
    for name in COUNTS:
        count = case.body.get(name)
        if type(count) is int and MOST < count <= (MAX_N if name == "n" else MAX_TOKENS):
            case.body[name] = MOST
    limit = LIMITS.get(case.operation.path)
    if limit is not None and limit not in case.body:
        case.body[limit] = MOST
