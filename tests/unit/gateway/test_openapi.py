"""The OpenAPI document has every endpoint and field."""

from typing import Any

import jsonschema
import pytest
from jsonschema.validators import Draft202012Validator
from starlette.routing import Route

from headrace_gateway import GatewaySettings, make_app
from headrace_gateway.http.request_log import endpoint_of
from headrace_gateway.openapi import document
from headrace_gateway.requests import field_tables
from unit.gateway.bodies import CHAT

SCHEMAS: dict[str, Any] = document.document()["components"]["schemas"]


def test_every_schema_is_valid() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


ROUTES = {
    (route.path.replace(":path", ""), method.lower())
    for route in make_app(GatewaySettings()).routes
    if isinstance(route, Route)
    for method in route.methods or ()
    if method != "HEAD"
}
OF_THE_PAGE = ("/page/", "/headrace/")
NOT_DOCUMENTED = {("/", "get"): "the page", ("/v1/responses/compact", "post"): "refused"}


def test_every_route_of_the_application_is_documented() -> None:
    served = {route for route in ROUTES if not route[0].startswith(OF_THE_PAGE)} - NOT_DOCUMENTED.keys()
    told = {(path, method) for path, methods in document.document()["paths"].items() for method in methods}
    assert told == served


def test_every_route_but_the_document_has_a_label_of_its_own_in_metrics() -> None:
    assert {path for path, _ in ROUTES if endpoint_of(path) == "other"} == {"/openapi.json"}


@pytest.mark.parametrize(
    ("schema", "served"),
    [("ChatCompletionRequest", field_tables.CHAT), ("CompletionRequest", field_tables.COMPLETION)],
)
def test_a_body_has_the_fields_of_the_tables(schema: str, served: frozenset[str]) -> None:
    fields = served | set(field_tables.SAMPLING) | set(field_tables.IGNORED)
    assert set(SCHEMAS[schema]["properties"]) == fields


def test_a_body_of_a_response_has_the_fields_of_its_tables() -> None:
    fields = field_tables.RESPONSE | (field_tables.SAMPLING.keys() - field_tables.RESPONSE_REFUSED.keys())
    assert set(SCHEMAS["ResponseRequest"]["properties"]) == fields | field_tables.IGNORED.keys()


def test_an_unknown_field_is_valid_as_it_is_ignored() -> None:
    jsonschema.validate({**CHAT, "colour": 1}, SCHEMAS["ChatCompletionRequest"])
