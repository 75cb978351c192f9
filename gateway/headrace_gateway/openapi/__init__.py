"""The API as an OpenAPI document. `python -m headrace_gateway.openapi write` writes docs/openapi.json."""
