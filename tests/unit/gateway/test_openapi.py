"""The OpenAPI document: docs/openapi.json is up to date, and every endpoint and field is documented."""

from typing import Any

import jsonschema
import pytest
from jsonschema.validators import Draft202012Validator

from headrace_gateway import (
    anthropic_endpoints,
    field_tables,
    generation,
    models_endpoint,
    probes,
    responses,
    tokenizer_endpoints,
)
from headrace_gateway.anthropic_fields import read_counted, read_message
from headrace_gateway.batch import batches_endpoint
from headrace_gateway.chat_fields import read_chat
from headrace_gateway.completion_fields import read_completion
from headrace_gateway.files import files_endpoint
from headrace_gateway.openapi import document
from headrace_gateway.response_fields import read_response
from unit.gateway.bodies import CHAT, COMPLETION, RESPONSE, model, outcome
from unit.gateway.test_chat_fields import SAMPLING_VALUES

SCHEMAS: dict[str, Any] = document.document()["components"]["schemas"]


def test_docs_openapi_json_is_up_to_date() -> None:
    assert document.PATH.read_text() == document.text(), "write it anew: python -m headrace_gateway.openapi write"


def test_every_schema_is_valid() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


def test_every_endpoint_is_documented() -> None:
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in (
            *generation.routes,
            *anthropic_endpoints.routes,
            *tokenizer_endpoints.routes,
            *responses.routes,
            *models_endpoint.routes,
            *files_endpoint.routes,
            *batches_endpoint.routes,
            *probes.routes,
            *document.routes,
        )
        for method in route.methods or ()
        if method != "HEAD"
    }
    told = {(path, method) for path, methods in document.document()["paths"].items() for method in methods}
    assert told == served


@pytest.mark.parametrize(
    ("schema", "served"),
    [("ChatCompletionRequest", field_tables.CHAT), ("CompletionRequest", field_tables.COMPLETION)],
)
def test_a_body_has_the_fields_of_the_tables(schema: str, served: frozenset[str]) -> None:
    fields = served | set(field_tables.SAMPLING) | set(field_tables.IGNORED)
    assert set(SCHEMAS[schema]["properties"]) == fields
    assert SCHEMAS[schema]["additionalProperties"] is False


def test_a_body_of_a_response_has_the_fields_of_its_tables() -> None:
    fields = field_tables.RESPONSE | (field_tables.SAMPLING.keys() - field_tables.RESPONSE_REFUSED.keys())
    assert set(SCHEMAS["ResponseRequest"]["properties"]) == fields | field_tables.IGNORED.keys()


@pytest.mark.parametrize("name", sorted(field_tables.MESSAGES - {"model"}))
def test_the_document_and_the_reader_of_messages_accept_the_same_values(name: str) -> None:
    values: list[Any] = [None, -3, 0, 1, 2.5, 10**30, "", "a", [], [1], [""], {}, {"1": 1}, {"type": "adaptive"}, True]
    least = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    for value in values:
        for read, schema, served in (
            (read_message, "MessageRequest", field_tables.MESSAGES),
            (read_counted, "MessageTokensRequest", field_tables.COUNTED_MESSAGES),
        ):
            body = {field: each for field, each in {**least, name: value}.items() if field in served}
            if outcome(read, body, model=model(), lora=None) is None:
                assert Draft202012Validator(SCHEMAS[schema]).is_valid(body), value


@pytest.mark.parametrize("name", SAMPLING_VALUES)
def test_the_document_and_the_readers_accept_the_same_values(name: str) -> None:
    for value in (SAMPLING_VALUES[name], None, -3, 0, 1, 2.5, 10**30, "", "a", "1", [], [1], [""], {}, {"1": 1}, True):
        bodies = (
            (read_chat, CHAT, "ChatCompletionRequest"),
            (read_completion, COMPLETION, "CompletionRequest"),
            (read_response, RESPONSE, "ResponseRequest"),
        )
        for read, least, schema in bodies:
            context = {"lora": None} if read is read_completion else {"model": model(), "lora": None}
            if name not in SCHEMAS[schema]["properties"]:
                continue
            body = {**least, name: value}
            accepted = outcome(read, body, **context) is None
            valid = Draft202012Validator(SCHEMAS[schema]).is_valid(body)
            if accepted:
                assert valid, value  # rules between fields may refuse what the document allows, but not the reverse


def test_an_unknown_field_is_not_in_the_document() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**CHAT, "colour": 1}, SCHEMAS["ChatCompletionRequest"])
