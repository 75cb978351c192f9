"""JSON Schemas of the usage API."""

from typing import Final

from headrace_gateway.openapi.schemas import INTEGER, STRING, Schema, array, closed, integer, or_null
from headrace_gateway.usage.query import FILTERS, GROUPS, LATEST, WIDTHS

_NAMES: Final = {name: or_null(STRING) for name in GROUPS}


def _page(kind: str, **counts: Schema) -> Schema:
    result: Schema = {
        "object": {"const": f"organization.usage.{kind}.result"},
        "input_tokens": INTEGER,
        "num_model_requests": INTEGER,
        **_NAMES,
        **counts,
    }
    bucket: Schema = {
        "object": {"const": "bucket"},
        "start_time": INTEGER,
        "end_time": INTEGER,
        "results": array(closed(result, *result)),
    }
    page: Schema = {
        "object": {"const": "page"},
        "data": array(closed(bucket, *bucket)),
        "has_more": {"type": "boolean"},
        "next_page": or_null(STRING),
    }
    return closed(page, *page)


SCHEMAS: Final = {
    "CompletionsUsage": _page(
        "completions",
        output_tokens=INTEGER,
        input_cached_tokens=INTEGER,
        input_audio_tokens={"const": 0},
        output_audio_tokens={"const": 0},
        batch={"type": "null"},
        service_tier={"type": "null"},
    ),
    "EmbeddingsUsage": _page("embeddings"),
}
PARAMETERS: Final[dict[str, Schema]] = {
    "start_time": integer(0, LATEST),
    "end_time": integer(0, LATEST),
    "bucket_width": {"enum": list(WIDTHS)},
    "group_by": array({"enum": list(GROUPS)}),
    **{name: array(STRING) for name in FILTERS},
    "limit": integer(1, max(most for _, _, most in WIDTHS.values())),
    "page": STRING,
}
"""By name: the schema of a parameter of the query. `start_time` is required."""
