"""What the gateway asks of a model's tokenizer, which its workers have and the gateway has not."""

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
"""A worker registers its model each minute: one that has not done so for longer is gone."""
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
    """The result of a call.

    Raises ApiError where the prompt is refused as a request's would be, 501 where the model's workers are of a release
    that answers no calls, and 503 where none answers.
    """
    if not model.tokenizer_calls:
        message = f"the workers of {model.name} are of a release that answers no calls of the tokenizer"
        raise ApiError(501, "server_error", "unsupported", message, headers=NO_RETRY)
    if time.time() - model.seen > _SILENT_SECONDS:
        raise _unavailable(f"no worker of {model.name} is there to answer; try again later")
    try:
        return await gateway.tokenizers.call(model.name, kind, body, key=key.name)
    except TokenizerCallError as error:
        if error.code == "tokenizer_unavailable":
            raise _unavailable(str(error)) from error
        raise api_error_of_end(error.code, str(error), prompt_field=prompt_field) from error


async def count_tokens(
    gateway: Gateway, key: ApiKey, model: RegisteredModel, submission: SubmitRequest, *, prompt_field: str
) -> int:
    """How many tokens the prompt of a request has: the `prompt_tokens` that its answer would tell."""
    body = {"request": prompt_of(submission)}
    result = await call_tokenizer(gateway, key, model, "count", body, prompt_field=prompt_field)
    return int(result["count"])


def prompt_of(submission: SubmitRequest) -> dict[str, Any]:
    """The part of a request that becomes its prompt."""
    return {name: value for name, value in submission.items() if name in _PROMPT}


def _unavailable(message: str) -> ApiError:
    return ApiError(503, "server_error", "tokenizer_unavailable", message, headers={"retry-after": "1"})
