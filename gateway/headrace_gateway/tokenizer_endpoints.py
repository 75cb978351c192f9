"""`POST /tokenize` and `POST /detokenize` in vLLM's format, and OpenAI's count of a response's input tokens."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_broker import RegisteredModel
from headrace_broker.messages import MAX_PROMPT_TOKENS
from headrace_broker.sampling_rules import token_id_problem
from headrace_gateway import call_fields, field_tables
from headrace_gateway.body import read_json
from headrace_gateway.call_fields import boolean
from headrace_gateway.chat_fields import read_chat
from headrace_gateway.context import gateway_of, key_of
from headrace_gateway.errors import invalid
from headrace_gateway.generation import require_redis
from headrace_gateway.json_response import JsonResponse
from headrace_gateway.problems import Problems, shown
from headrace_gateway.response_chain import read_history
from headrace_gateway.response_fields import read_response
from headrace_gateway.tokenizer_calls import call_tokenizer, count_tokens, prompt_of


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`: the token ids of a prompt, or of a chat rendered by the model's template."""
    given, model, lora = await _read(request)
    is_chat = "messages" in given
    problems = Problems()
    known = field_tables.TOKENIZE_CHAT if is_chat else field_tables.TOKENIZE_PROMPT
    problems.unknown_names(given, known, field_tables.REFUSED)
    add_special_tokens = boolean(given, "add_special_tokens", problems, default=not is_chat)
    token_strs = boolean(given, "return_token_strs", problems)
    if not is_chat and not isinstance(given.get("prompt"), str):
        problems.add("prompt", f"prompt must be a string, not {shown(given.get('prompt'))}; or give messages")
    problems.raise_any()
    if is_chat:
        chat = {name: given[name] for name in field_tables.TOKENIZE_CHAT & field_tables.CHAT if name in given}
        prompt = prompt_of(read_chat({"model": model.name, **chat}, model=model, lora=lora).submissions[0])
    else:
        prompt = {"prompt": given["prompt"]}
    body = {"request": prompt, "add_special_tokens": add_special_tokens, "token_strs": token_strs}
    prompt_field = "messages" if is_chat else "prompt"
    gateway, key = gateway_of(request), key_of(request)
    request.scope["state"]["answer_headers"] = await gateway.limits.admit(key)
    return JsonResponse(await call_tokenizer(gateway, key, model, "tokenize", body, prompt_field=prompt_field))


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`: the text of token ids, special tokens included."""
    given, model, _ = await _read(request)
    problems = Problems()
    problems.unknown_names(given, field_tables.DETOKENIZE, field_tables.REFUSED)
    tokens = given.get("tokens")
    if not isinstance(tokens, list) or len(tokens) > MAX_PROMPT_TOKENS:
        problems.add("tokens", f"tokens must be an array of at most {MAX_PROMPT_TOKENS} token ids, not {shown(tokens)}")
    elif problem := token_id_problem(tokens):
        problems.add("tokens", f"tokens {problem}")
    problems.raise_any()
    gateway, key = gateway_of(request), key_of(request)
    request.scope["state"]["answer_headers"] = await gateway.limits.admit(key)
    body = {"tokens": tokens}
    return JsonResponse(await call_tokenizer(gateway, key, model, "detokenize", body, prompt_field="tokens"))


async def count_input_tokens(request: Request) -> Response:
    """`POST /v1/responses/input_tokens`: takes the body of `POST /v1/responses`."""
    gateway, key = gateway_of(request), key_of(request)
    require_redis(request)
    body = await read_json(request, gateway.settings.max_body_bytes)
    model, lora = await gateway.models.find(body.get("model"), key)
    history = await read_history(gateway, key, body.get("previous_response_id"))
    call = read_response(body, model=model, lora=lora, history=history)
    request.scope["state"]["answer_headers"] = await gateway.limits.admit(key)
    count = await count_tokens(gateway, key, model, call.submissions[0], prompt_field="input")
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


async def _read(request: Request) -> tuple[dict[str, Any], RegisteredModel, str | None]:
    """Return the body's fields and the model, which may be left out if the key may use only one."""
    gateway, key = gateway_of(request), key_of(request)
    require_redis(request)
    given = call_fields.without_nulls(await read_json(request, gateway.settings.max_body_bytes))
    if "model" in given:
        return given, *await gateway.models.find(given["model"], key)
    model = await gateway.models.only(key)
    if model is None:
        raise invalid("model is required: this key may use several models, or none", param="model")
    return given, model, None


routes: Final = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
]
