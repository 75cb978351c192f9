"""Get an answer that is valid JSON of a schema, and parse it: `pip install .`"""

import json
import os

from headrace_broker import Client

URL = os.environ.get("HEADRACE_REDIS_URL", "redis://127.0.0.1:6379/0")
MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")
SCHEMA = {
    "type": "object",
    "properties": {"river": {"type": "string", "maxLength": 20}, "length_km": {"type": "integer", "minimum": 1}},
    "required": ["river", "length_km"],
    "additionalProperties": False,
}

with Client(URL, model=MODEL) as client:
    request_id = client.submit(
        prompt="A river and its length, as JSON: ",
        sampling_params={
            "max_tokens": 200,
            "structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"},
        },
    )
    [output] = client.result(request_id).outputs
if output.finish_reason != "stop":  # max_tokens cut it: not a whole document
    raise SystemExit(f"the output ended by {output.finish_reason}: {output.text!r}")
print(json.loads(output.text))
