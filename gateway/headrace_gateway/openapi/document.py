"""The API as an OpenAPI 3.1 document, served at `/openapi.json`.

The request bodies are generated from the tables that the gateway reads requests by,
so the two cannot differ.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_gateway.answers.reader import CURSOR_PATTERN
from headrace_gateway.batch import endpoints as batches_endpoint
from headrace_gateway.files import endpoints as files_endpoint
from headrace_gateway.http.json import JsonResponse
from headrace_gateway.openapi import (
    anthropic_schemas,
    batch_schemas,
    decision_schemas,
    pooling_schemas,
    response_schemas,
    schemas,
    tokenizer_schemas,
    usage_schemas,
)
from headrace_gateway.openapi.schemas import Schema, integer
from headrace_gateway.requests import field_tables
from headrace_gateway.requests.headers import LONGEST_ABANDON_AFTER, LONGEST_EXPIRES, MAX_KEY_CHARS
from headrace_gateway.responses.endpoints import MAX_PAGE

_ERRORS: Final = {
    400: "A field, a header or the JSON is invalid",
    401: "The API key is missing or unknown",
    403: "The request comes from a host or an origin that is not allowed",
    404: "The model or the answer does not exist, or belongs to another key",
    408: "The upload took too long",
    413: "The body is too large",
    415: "The body is not application/json, or compressed",
    422: "The Idempotency-Key was used with another request",
    424: "The model failed, or does not serve the task",
    429: "A limit of the key, the tenant or the queue is reached",
    499: "The request was cancelled",
    500: "The engine failed",
    501: "The gateway stores no files, or the model's workers do not support tokenizer calls",
    503: "The queue or the tokenizer is unavailable",
    504: "The request's deadline passed",
    507: "The disk is full",
}
_OF_MESSAGES: Final = _ERRORS | {529: "The queue is full or unavailable"}
_WHEN_ASKED: Final = (400, 401, 403, 404, 413, 415, 429, 501, 503)
_WHEN_STORED: Final = (400, 401, 403, 404, 408, 413, 415, 429, 501, 503, 507)
_WHEN_CREATED: Final = tuple(status for status in _ERRORS if status not in (408, 424, 501, 507))
_WHEN_READ: Final = tuple(status for status in _WHEN_CREATED if status not in (413, 415, 422))
_WHEN_LISTED: Final = (401, 403, 503)
_RETRY: Final = {"headers": {"Retry-After": {"schema": {"type": "string", "pattern": "^[0-9]+$"}}}}


@cache
def document() -> dict[str, Any]:
    """Make the document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": "v1",
            "description": "OpenAI's API on a queue. A client can rejoin a stream at any replica.",
        },
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": {
            **_models(),
            **_completions(),
            **_responses(),
            **_messages(),
            **_pooling(),
            "/v1/decisions": {"post": _pool("/v1/decisions", "DecisionRequest", "Decision", "Error")},
            **_tokenizer(),
            **_files_and_batches(),
            **_usage(),
            **_operations(),
        },
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": _SCHEMAS,
        },
    }


def _body(own: Mapping[str, Schema], served: frozenset[str], *required: str) -> Schema:
    fields = {**schemas.FIELDS, **own}
    return schemas.body(fields, served | field_tables.SAMPLING.keys(), field_tables.IGNORED, *required)


_SCHEMAS: Final = {
    "ChatCompletionRequest": _body(schemas.CHAT_FIELDS, field_tables.CHAT, "model", "messages"),
    "CompletionRequest": _body(schemas.COMPLETION_FIELDS, field_tables.COMPLETION, "model", "prompt"),
    "MessageRequest": anthropic_schemas.REQUEST,
    "MessageTokensRequest": anthropic_schemas.COUNTED_REQUEST,
    "TokenizedRequest": tokenizer_schemas.TOKENIZE_REQUEST,
    "DetokenizedRequest": tokenizer_schemas.DETOKENIZE_REQUEST,
    **batch_schemas.SCHEMAS,
    **decision_schemas.SCHEMAS,
    **pooling_schemas.SCHEMAS,
    **usage_schemas.SCHEMAS,
    "ChatCompletion": schemas.CHAT_COMPLETION,
    "Completion": schemas.COMPLETION,
    "ResponseRequest": response_schemas.REQUEST,
    "Response": response_schemas.RESPONSE,
    "DeletedResponse": response_schemas.DELETED,
    "ResponseItems": response_schemas.ITEMS,
    "Message": anthropic_schemas.MESSAGE,
    "MessageTokens": anthropic_schemas.TOKENS,
    "ResponseInputTokens": tokenizer_schemas.RESPONSE_TOKENS,
    "Tokenized": tokenizer_schemas.TOKENIZED,
    "Detokenized": tokenizer_schemas.DETOKENIZED,
    "Unfinished": schemas.UNFINISHED,
    "Model": schemas.MODEL,
    "Models": schemas.MODELS,
    "Probe": schemas.PROBE,
    "Error": schemas.ERROR,
    "MessageError": anthropic_schemas.ERROR,
}


def _models() -> dict[str, Any]:
    one = _operation("find_model", "Describe a model", (*_WHEN_LISTED, 404), {"200": _json("Model")})
    return {
        "/v1/models": {"get": _operation("list_models", "List the models", _WHEN_LISTED, {"200": _json("Models")})},
        "/v1/models/{id}": {"get": one | {"parameters": [_ID]}},
    }


def _completions() -> dict[str, Any]:
    return {
        "/v1/chat/completions": {"post": _create("create_chat_completion", "ChatCompletion")},
        "/v1/chat/completions/{id}": {"get": _read("read_chat_completion", "ChatCompletion")},
        "/v1/completions": {"post": _create("create_completion", "Completion")},
        "/v1/completions/{id}": {"get": _read("read_completion", "Completion")},
    }


def _responses() -> dict[str, Any]:
    return {
        "/v1/responses": {"post": _create("create_response", "Response")},
        "/v1/responses/{id}": {
            "get": _of_response(
                "read_response",
                "Read a Response, or its events",
                _answer_or_stream("Response"),
                _parameter("query", "stream", schemas.BOOLEAN),
                _parameter("query", "starting_after", integer(0, 10**18)),
            ),
            "delete": _of_response("delete_response", "Delete a Response", _json("DeletedResponse")),
        },
        "/v1/responses/{id}/cancel": {
            "post": _of_response(
                "cancel_response",
                "Cancel a Response in the background",
                _json("Response"),
                refusals=(*_WHEN_READ, 415),
            ),
        },
        "/v1/responses/{id}/input_items": {
            "get": _of_response(
                "list_input_items",
                "List the input of a Response",
                _json("ResponseItems"),
                _parameter("query", "limit", integer(1, MAX_PAGE)),
                _parameter("query", "order", {"enum": ["asc", "desc"]}),
                _parameter("query", "after", schemas.STRING),
            ),
        },
    }


def _messages() -> dict[str, Any]:
    return {
        "/v1/messages": {"post": _of_anthropic(_create("create_message", "Message"))},
        "/v1/messages/{id}": {"get": _of_anthropic(_read("read_message", "Message"))},
        "/v1/messages/count_tokens": {"post": _of_anthropic(_ask("count_message_tokens", "MessageTokens"))},
    }


def _pooling() -> dict[str, Any]:
    return {path: {"post": _pool(path, *names)} for path, names in pooling_schemas.ENDPOINTS.items()}


def _pool(path: str, request: str, answer: str, error: str) -> dict[str, Any]:
    name = "create" + "_".join(path.split("/"))
    statuses = _WHEN_CREATED if error == "Error" else (*_WHEN_CREATED, 424)
    operation = _operation(name, f"Compute: {answer}", statuses, {"200": _json(answer)}, error)
    return operation | {"parameters": _QUEUE_HEADERS} | _request_body(_ref(request))


def _tokenizer() -> dict[str, Any]:
    return {
        "/v1/responses/input_tokens": {"post": _ask("count_response_tokens", "ResponseInputTokens", "ResponseRequest")},
        "/tokenize": {"post": _ask("tokenize", "Tokenized")},
        "/detokenize": {"post": _ask("detokenize", "Detokenized")},
    }


def _usage() -> dict[str, Any]:
    asked = [_parameter("query", name, schema) for name, schema in usage_schemas.PARAMETERS.items()]
    asked[0]["required"] = True  # start_time
    found = {}
    for kind in ("completions", "embeddings"):
        name = f"read_{kind}_usage"
        told = {"200": _json(f"{kind.capitalize()}Usage")}
        operation = _operation(name, f"Read the usage of {kind}", (400, *_WHEN_LISTED), told)
        found[f"/v1/organization/usage/{kind}"] = {"get": operation | {"parameters": asked}}
    return found


def _operations() -> dict[str, Any]:
    ready = {"200": _json("Probe"), "503": {**_json("Probe"), **_RETRY}}
    return {
        "/health": {"get": _operation("health", "The process is alive", (403,), {"200": _json("Probe")})},
        "/ready": {"get": _operation("ready", "Redis answers and has a registered model", (403,), ready)},
        "/openapi.json": {
            "get": _operation("openapi", "This document", (401, 403), {"200": _content("The document", {})})
        },
    }


def _ref(schema: str) -> Schema:
    return {"$ref": f"#/components/schemas/{schema}"}


def _content(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _json(schema: str) -> dict[str, Any]:
    return _content(schema, _ref(schema))


def _operation(
    name: str, summary: str, errors: tuple[int, ...], responses: Mapping[str, dict[str, Any]], error: str = "Error"
) -> dict[str, Any]:
    told = {
        str(status): _content(_ERRORS[status], _ref(error)) | (_RETRY if status in (429, 503) else {})
        for status in sorted(errors)
    }
    return {"operationId": name, "summary": summary, "responses": {**responses, **told}}


def _parameter(place: str, name: str, schema: Schema) -> dict[str, Any]:
    return {"in": place, "name": name, "required": place == "path", "schema": schema}


_ID: Final = _parameter("path", "id", schemas.STRING)
_QUEUE_HEADERS: Final = [
    _parameter("header", "X-Headrace-Priority", integer(0, 9)),
    _parameter("header", "X-Headrace-Expires", {"type": "number", "minimum": 1, "maximum": LONGEST_EXPIRES}),
    _parameter(
        "header", "X-Headrace-Abandon-After", {"type": "number", "minimum": 0, "maximum": LONGEST_ABANDON_AFTER}
    ),
    _parameter("header", "Idempotency-Key", {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS}),
]
_RESUME: Final = _parameter("header", "X-Headrace-Resume", {"enum": ["0", "1", "id", "chunk"]})


def _request_body(schema: Schema, kind: str = "application/json") -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}


def _create(name: str, answer: str) -> dict[str, Any]:
    operation = _operation(name, f"Create a {answer}", _WHEN_CREATED, {"200": _answer_or_stream(answer)})
    return operation | {"parameters": [*_QUEUE_HEADERS, _RESUME]} | _request_body(_ref(f"{answer}Request"))


def _ask(name: str, answer: str, request: str | None = None) -> dict[str, Any]:
    operation = _operation(name, f"Ask a tokenizer: {answer}", _WHEN_ASKED, {"200": _json(answer)})
    return operation | _request_body(_ref(request or f"{answer}Request"))


def _files_and_batches() -> dict[str, Any]:
    form = _request_body(batch_schemas.UPLOAD, "multipart/form-data")
    after, order = _parameter("query", "after", schemas.STRING), {"enum": ["asc", "desc"]}
    content = {"description": "The content", "content": {"application/octet-stream": {"schema": {}}}}
    limit = _parameter("query", "limit", integer(1, batches_endpoint.MOST_LISTED))
    most_files = integer(1, files_endpoint.MOST_LISTED)
    listed = [after, _parameter("query", "limit", most_files), _parameter("query", "order", order)]
    listed.append(_parameter("query", "purpose", schemas.STRING))
    return {
        "/v1/files": {
            "get": _kept("list_files", "List the files", "Files", *listed),
            "post": _kept("upload_file", "Upload a file", "File") | form,
        },
        "/v1/files/{id}": {
            "get": _kept("find_file", "Describe a file", "File", _ID),
            "delete": _kept("delete_file", "Delete a file", "DeletedFile", _ID),
        },
        "/v1/files/{id}/content": {
            "get": _operation("read_file", "Read a file", _WHEN_STORED, {"200": content}) | {"parameters": [_ID]}
        },
        "/v1/batches": {
            "get": _kept("list_batches", "List the batches", "Batches", after, limit),
            "post": _kept("create_batch", "Create a batch", "Batch") | _request_body(_ref("BatchRequest")),
        },
        "/v1/batches/{id}": {"get": _kept("find_batch", "Describe a batch", "Batch", _ID)},
        "/v1/batches/{id}/cancel": {"post": _kept("cancel_batch", "Cancel a batch", "Batch", _ID)},
    }


def _kept(name: str, summary: str, answer: str, *parameters: dict[str, Any]) -> dict[str, Any]:
    return _operation(name, summary, _WHEN_STORED, {"200": _json(answer)}) | {"parameters": list(parameters)}


def _of_anthropic(operation: dict[str, Any]) -> dict[str, Any]:
    """Return the operation with errors in Anthropic's format, where our 503 becomes 529."""
    told = {status: response for status, response in operation["responses"].items() if status < "400"}
    failures = {int(status) for status in operation["responses"].keys() - told.keys() - {"503"}}
    for status in sorted(failures | {529}):
        told[str(status)] = _content(_OF_MESSAGES[status], _ref("MessageError"))
        told[str(status)] |= _RETRY if status in (429, 529) else {}
    return operation | {"responses": told}


def _read(name: str, answer: str) -> dict[str, Any]:
    unfinished = {**_json("Unfinished"), **_RETRY}
    responses = {"200": _answer_or_stream(answer), "202": unfinished}
    place: Schema = {"type": "string", "pattern": f"^{CURSOR_PATTERN}$"}
    return _operation(name, f"Retrieve a {answer}, or rejoin its stream", _WHEN_READ, responses) | {
        "parameters": [
            _ID,
            _parameter("query", "stream", schemas.BOOLEAN),
            _parameter("query", "starting_after", place),
            _parameter("header", "Last-Event-ID", {"type": "string", "pattern": f"^({CURSOR_PATTERN})?$"}),
            _RESUME,
        ]
    }


def _of_response(
    name: str, summary: str, found: dict[str, Any], *query: dict[str, Any], refusals: tuple[int, ...] = _WHEN_READ
) -> dict[str, Any]:
    operation = _operation(name, summary, refusals, {"200": found})
    return operation | {"parameters": [_ID, *query]}


def _answer_or_stream(answer: str) -> dict[str, Any]:
    found = _content(answer, _ref(answer))
    found["content"]["text/event-stream"] = {"schema": {}}
    return found


async def show(_request: Request) -> Response:
    """`GET /openapi.json`."""
    return JsonResponse(document())


routes: Final = [Route("/openapi.json", show, methods=["GET"])]


def text() -> str:
    """Return the text of docs/openapi.json."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"
