"""The API as an OpenAPI document. `make reference` writes docs/openapi.json."""
