"""Calls of a model's tokenizer. The workers have the tokenizer, the gateway does not."""

import time
from collections.abc import Mapping
from typing import Any, Final

from headrace_broker import RegisteredModel, SubmitRequest
from headrace_broker.chat_rules import CHAT_OPTIONS
from headrace_broker.errors import TokenizerCallError
from headrace_broker.tokenizer_calls import TokenizerCallKind
from headrace_gateway.broker_errors import NO_RETRY, api_error_of_end
from headrace_gateway.context import Gateway
from headrace_gateway.errors import ApiError
from headrace_gateway.keys import ApiKey

_SILENT_SECONDS: Final = 300.0
"""A worker registers its model every minute. One that has not done so for this long is gone."""
_PROMPT: Final = ("prompt", "messages", *CHAT_OPTIONS)


async def call_tokenizer(
    gateway: Gateway,
    key: ApiKey,
    model: RegisteredModel,
    kind: TokenizerCallKind,
    body: Mapping[str, Any],
    *,
    prompt_field: str,
) -> dict[str, Any]:
    """Return the result of a call.

    Raises ApiError: as for a request, if the prompt is refused; 501 if the workers' release does not support calls; 503
    if no worker answers.
    """
    if not model.tokenizer_calls:
        message = f"the workers of {model.name} do not support tokenizer calls: update them"
        raise ApiError(501, "server_error", "unsupported", message, headers=NO_RETRY)
    if time.time() - model.seen > _SILENT_SECONDS:
        raise _unavailable(f"no worker of {model.name} is running; try again later")
    try:
        return await gateway.tokenizers.call(model.name, kind, body, key=key.name)
    except TokenizerCallError as error:
        if error.code == "tokenizer_unavailable":
            raise _unavailable(str(error)) from error
        raise api_error_of_end(error.code, str(error), prompt_field=prompt_field) from error


async def count_tokens(
    gateway: Gateway, key: ApiKey, model: RegisteredModel, submission: SubmitRequest, *, prompt_field: str
) -> int:
    """Return the number of prompt tokens: the `prompt_tokens` that the answer of the same request reports."""
    body = {"request": prompt_of(submission)}
    result = await call_tokenizer(gateway, key, model, "count", body, prompt_field=prompt_field)
    return int(result["count"])


def prompt_of(submission: SubmitRequest) -> dict[str, Any]:
    """Return the part of a request that determines its prompt."""
    return {name: value for name, value in submission.items() if name in _PROMPT}


def _unavailable(message: str) -> ApiError:
    return ApiError(503, "server_error", "tokenizer_unavailable", message, headers={"retry-after": "1"})
