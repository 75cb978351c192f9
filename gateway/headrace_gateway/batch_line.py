"""The lines of a batch in the format of OpenAI's Batch API and vLLM's `run-batch`: a request and its answer.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [...]}}
{"id": "batch_req_...", "custom_id": "a", "error": null,
 "response": {"status_code": 200, "request_id": "...", "body": {...}}}
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace_broker import RegisteredModel
from headrace_gateway.call import Call
from headrace_gateway.chat_fields import read_chat
from headrace_gateway.completion_fields import read_completion
from headrace_gateway.errors import invalid
from headrace_gateway.json_object import read_object
from headrace_gateway.line_json import encode_line
from headrace_gateway.problems import shown
from headrace_gateway.response_fields import read_response
from headrace_gateway.settings import MAX_BODY_BYTES

MAX_LINE_BYTES: Final = MAX_BODY_BYTES
MAX_CUSTOM_ID: Final = 512
ENDPOINTS: Final = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-", "/v1/responses": "resp_"}
"""The accepted values of `url`, and the prefix of the answer's id for each."""
_FIELDS: Final = ("custom_id", "method", "url", "body")
_ENCODE: Final = msgspec.json.Encoder().encode


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def id(self) -> str:
        """The id of the line that answers it: a digest, so it identifies this request alone."""
        content = _ENCODE([self.custom_id, self.url, self.body])
        return f"batch_req_{hashlib.blake2b(content, digest_size=16).hexdigest()}"

    @property
    def id_prefix(self) -> str:
        """The prefix of its answer's id."""
        return ENDPOINTS[self.url]

    def read_call(self, model: RegisteredModel, lora: str | None) -> Call:
        """Check the body as the endpoint does. Raises ApiError that lists every problem."""
        if self.url == "/v1/chat/completions":
            return read_chat(self.body, model=model, lora=lora)
        if self.url == "/v1/completions":
            return read_completion(self.body, lora=lora)
        for name in ("background", "previous_response_id"):
            if self.body.get(name):
                message = f"body.{name} is not supported in a batch, whose responses are not stored"
                raise invalid(message, code="unsupported", param=f"body.{name}")
        return read_response({**self.body, "store": False}, model=model, lora=lora)

    def answered(self, status: int, request_id: str, body: Mapping[str, Any]) -> bytes:
        """Return the line of an answer, with its line feed."""
        return self._line({"status_code": status, "request_id": request_id, "body": body}, None)

    def unanswered(self, code: str, message: str) -> bytes:
        """Return the line of a request without an answer."""
        return self._line(None, {"code": code, "message": message})

    def _line(self, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
        line = {"id": self.id, "custom_id": self.custom_id, "response": response, "error": error}
        return encode_line(line) + b"\n"


def read_line(raw: bytes) -> BatchLine:
    """Parse a line of the input; `read_call` checks its body. Raises ApiError, with OpenAI's code if there is one."""
    if len(raw) > MAX_LINE_BYTES:
        raise invalid(f"the line must be at most {MAX_LINE_BYTES} bytes", code="line_too_large")
    line = read_object(raw, "line", "invalid_json_line")
    custom_id, method, url, body = (line.get(name) for name in _FIELDS)
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters, not {shown(custom_id)}"
        raise invalid(message, code="invalid_custom_id", param="custom_id")
    if method != "POST":
        raise invalid("method must be POST", code="invalid_method", param="method")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise invalid(f"url must be {' or '.join(ENDPOINTS)}", code="invalid_url", param="url")
    if not isinstance(body, dict):
        raise invalid(f"body must be an object, not {shown(body)}", param="body")
    if body.get("stream"):
        raise invalid("body.stream must be false or absent: a batch does not stream", param="body.stream")
    for name in line:
        if name not in _FIELDS:
            raise invalid(f"unknown field {name[:64]!r}", code="unsupported_parameter", param=name[:64])
    return BatchLine(custom_id, url, body)
