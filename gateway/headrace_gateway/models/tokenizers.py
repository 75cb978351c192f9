"""`POST /tokenize` and `POST /detokenize` in vLLM's format, and OpenAI's count of a response's input tokens."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_broker import GenerateRequest, RegisteredModel
from headrace_broker.client.tokenizer_calls import TokenizerCallKind
from headrace_broker.errors import TokenizerCallError
from headrace_broker.models.registry import REGISTER_SECONDS
from headrace_gateway.admission import admitted_body, report_ignored
from headrace_gateway.chat.fields import read_chat
from headrace_gateway.context import Gateway, gateway_of, key_of
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.generation import require_redis
from headrace_gateway.http.broker_errors import NO_RETRY, api_error_of_end
from headrace_gateway.http.json import JsonResponse
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.requests import call_fields, field_tables
from headrace_gateway.requests.body import Body, model_named
from headrace_gateway.requests.call_fields import boolean
from headrace_gateway.requests.problems import Problems
from headrace_gateway.responses.endpoints import read_call
from headrace_wire.chat import CHAT_OPTIONS
from headrace_wire.codes import ErrorCode, GatewayCode
from headrace_wire.request import TOKENS
from headrace_wire.values import shown

_SILENT_SECONDS: Final = 5 * REGISTER_SECONDS
"""A model without a newer registration has no worker."""
_PROMPT: Final = ("prompt", "messages", *CHAT_OPTIONS)


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`: the token ids of a prompt, or of a chat rendered by the model's template."""
    gateway, key = gateway_of(request), key_of(request)
    require_redis(request)
    async with admitted_body(request) as body:
        model, lora = await _model(request, body)
        call, prompt_field, ignored = await body.read(partial(_read_tokenize, model=model, lora=lora))
    report_ignored(request, ignored)
    return JsonResponse(await call_tokenizer(gateway, key, model, "tokenize", call, prompt_field=prompt_field))


def _read_tokenize(
    body: Mapping[str, Any], *, model: RegisteredModel, lora: str | None
) -> tuple[dict[str, Any], str, dict[str, str]]:
    """Check the body. Return the body of the tokenizer call, the name of the prompt's field, and ignored fields."""
    given = call_fields.without_nulls(body)
    is_chat = "messages" in given
    problems = Problems()
    known = field_tables.TOKENIZE_CHAT if is_chat else field_tables.TOKENIZE_PROMPT
    both = {"prompt": "give prompt or messages, not both"} if is_chat else {}
    problems.unknown_names(given, known, field_tables.REFUSED | both)
    add_special_tokens = boolean(given, "add_special_tokens", problems, default=not is_chat)
    token_strs = boolean(given, "return_token_strs", problems)
    if not is_chat and not isinstance(given.get("prompt"), str):
        problems.add("prompt", f"prompt must be a string, got {shown(given.get('prompt'))}; or give messages")
    problems.raise_any()
    if is_chat:
        chat = {name: given[name] for name in field_tables.TOKENIZE_CHAT & field_tables.CHAT if name in given}
        read = read_chat({"model": model.name, **chat}, model=model, lora=lora)
        problems.ignored.update(read.ignored)
        prompt = prompt_of(read.requests[0])
    else:
        prompt = {"prompt": given["prompt"]}
    call = {"request": prompt, "add_special_tokens": add_special_tokens, "token_strs": token_strs}
    return call, "messages" if is_chat else "prompt", problems.ignored


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`: the text of token ids, special tokens included."""
    gateway, key = gateway_of(request), key_of(request)
    require_redis(request)
    async with admitted_body(request) as body:
        model, _ = await _model(request, body)
        call, ignored = await body.read(_read_detokenize)
    report_ignored(request, ignored)
    return JsonResponse(await call_tokenizer(gateway, key, model, "detokenize", call, prompt_field="tokens"))


def _read_detokenize(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Check the body. Return the body of the tokenizer call, and ignored fields."""
    given = call_fields.without_nulls(body)
    problems = Problems()
    problems.unknown_names(given, field_tables.DETOKENIZE, field_tables.REFUSED)
    tokens = given.get("tokens")
    if problem := TOKENS.problem("tokens", tokens):
        problems.add("tokens", problem)
    problems.raise_any()
    return {"tokens": tokens}, problems.ignored


async def count_input_tokens(request: Request) -> Response:
    """`POST /v1/responses/input_tokens`: takes the body of `POST /v1/responses`."""
    gateway, key = gateway_of(request), key_of(request)
    require_redis(request)
    async with admitted_body(request) as body:
        call, model = await read_call(request, body)
    report_ignored(request, call.ignored)
    count = await count_tokens(gateway, key, model, call.requests[0], prompt_field="input")
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


async def _model(request: Request, body: Body) -> tuple[RegisteredModel, str | None]:
    """Return the model and the adapter. The body may omit `model` if the key may use only one."""
    gateway, key = gateway_of(request), key_of(request)
    if await body.read(_names_model):
        return await gateway.models.find(await body.read(model_named), key, task=None)
    model = await gateway.models.only(key)
    if model is None:
        raise invalid("model is required: this key may use several models, or none", param="model")
    return model, None


def _names_model(body: Mapping[str, Any]) -> bool:
    return body.get("model") is not None


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
        raise ApiError(501, "server_error", ErrorCode.UNSUPPORTED, message, headers=NO_RETRY)
    if time.time() - model.seen > _SILENT_SECONDS:
        raise _unavailable(f"no worker of {model.name} is running; try again later")
    try:
        return await gateway.tokenizers.call(model.name, kind, body, key=key.name)
    except TokenizerCallError as error:
        if error.code == GatewayCode.TOKENIZER_UNAVAILABLE:
            raise _unavailable(str(error)) from error
        raise api_error_of_end(error.code, str(error), prompt_field=prompt_field) from error


async def count_tokens(
    gateway: Gateway, key: ApiKey, model: RegisteredModel, request: GenerateRequest, *, prompt_field: str
) -> int:
    """Return the number of prompt tokens: the `prompt_tokens` that the answer of the same request reports."""
    body = {"request": prompt_of(request)}
    result = await call_tokenizer(gateway, key, model, "count", body, prompt_field=prompt_field)
    return int(result["count"])


def prompt_of(request: GenerateRequest) -> dict[str, Any]:
    """Return the part of a request that determines its prompt."""
    return {name: value for name, value in request.to_kwargs().items() if name in _PROMPT}


def _unavailable(message: str) -> ApiError:
    return ApiError(503, "server_error", GatewayCode.TOKENIZER_UNAVAILABLE, message, headers={"retry-after": "1"})


routes: Final = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
]
