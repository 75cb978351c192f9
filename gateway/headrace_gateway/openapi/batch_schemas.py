"""JSON Schemas of files and batches."""

from typing import Final

from headrace_gateway.batch.line import ENDPOINTS
from headrace_gateway.batch.record import ENDED, OPEN
from headrace_gateway.files.upload import LEAST_SECONDS, MOST_SECONDS
from headrace_gateway.openapi.schemas import INTEGER, STRING, Schema, array, closed, fields, integer, or_null
from headrace_gateway.requests.field_rules import RULES

_METADATA: Final = RULES["metadata"].schema
_LIFE: Final = closed(
    {"anchor": {"const": "created_at"}, "seconds": integer(LEAST_SECONDS, MOST_SECONDS)}, "anchor", "seconds"
)


def _whole(properties: Schema) -> Schema:
    return closed(properties, *properties)


def _list(schema: str) -> Schema:
    return _whole(
        {
            "object": {"const": "list"},
            "data": array({"$ref": f"#/components/schemas/{schema}"}),
            "first_id": or_null(STRING),
            "last_id": or_null(STRING),
            "has_more": {"type": "boolean"},
        }
    )


UPLOAD: Final[Schema] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": integer(LEAST_SECONDS, MOST_SECONDS),
    },
}
FILE: Final = _whole(
    {
        "id": STRING,
        "object": {"const": "file"},
        "bytes": INTEGER,
        "created_at": INTEGER,
        "expires_at": INTEGER,
        "filename": STRING,
        "purpose": {"enum": ["batch", "batch_output"]},
        "status": {"const": "processed"},
        "status_details": {"type": "null"},
    }
)
FILES: Final = _list("File")
DELETED_FILE: Final = _whole({"id": STRING, "object": {"const": "file"}, "deleted": {"const": True}})
BATCH_REQUEST: Final = fields(
    {
        "input_file_id": STRING,
        "endpoint": {"enum": list(ENDPOINTS)},
        "completion_window": {"type": "string", "pattern": "^([1-9][0-9]{0,6}[smhd]|soonest)$"},
        "metadata": or_null(_METADATA),
        "output_expires_after": or_null(_LIFE),
    },
    "input_file_id",
    "endpoint",
    "completion_window",
)
_PROBLEM: Final = _whole(
    {"code": or_null(STRING), "line": or_null(INTEGER), "message": STRING, "param": or_null(STRING)}
)
_TIMES: Final = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
BATCH: Final = _whole(
    {
        "id": STRING,
        "object": {"const": "batch"},
        "endpoint": {"enum": list(ENDPOINTS)},
        "errors": or_null(_whole({"object": {"const": "list"}, "data": array(_PROBLEM)})),
        "input_file_id": STRING,
        "completion_window": STRING,
        "status": {"enum": [*OPEN, *sorted(ENDED)]},
        "output_file_id": or_null(STRING),
        "error_file_id": or_null(STRING),
        "created_at": INTEGER,
        "expires_at": INTEGER,
        "expected_at": or_null(INTEGER),
        **{f"{name}_at": or_null(INTEGER) for name in _TIMES},
        "request_counts": _whole({"total": INTEGER, "completed": INTEGER, "failed": INTEGER}),
        "model": or_null(STRING),
        "usage": _whole(
            {
                "input_tokens": INTEGER,
                "input_tokens_details": _whole({"cached_tokens": INTEGER}),
                "output_tokens": INTEGER,
                "output_tokens_details": _whole({"reasoning_tokens": INTEGER}),
                "total_tokens": INTEGER,
            }
        ),
        "metadata": or_null(_METADATA),
    }
)
BATCHES: Final = _list("Batch")
SCHEMAS: Final = {
    "File": FILE,
    "Files": FILES,
    "DeletedFile": DELETED_FILE,
    "BatchRequest": BATCH_REQUEST,
    "Batch": BATCH,
    "Batches": BATCHES,
}
