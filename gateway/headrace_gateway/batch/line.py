"""The lines of a batch in the format of OpenAI's Batch API and vLLM's `run-batch`: a request and its answer.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [...]}}
{"id": "batch_req_...", "custom_id": "a", "error": null,
 "response": {"status_code": 200, "request_id": "...", "body": {...}}}
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from headrace_broker import RegisteredModel
from headrace_gateway.chat.endpoints import CHAT
from headrace_gateway.completions.endpoints import COMPLETIONS
from headrace_gateway.decisions.fields import DECISIONS
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.generation import Api
from headrace_gateway.http.json import encode_line
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.pooling.classes import CLASSIFY
from headrace_gateway.pooling.embeddings import EMBEDDINGS, as_list
from headrace_gateway.pooling.pooling_body import PoolingApi, PoolingBody
from headrace_gateway.pooling.rerank import RERANK
from headrace_gateway.pooling.scores import SCORE
from headrace_gateway.pooling.tei import is_tei
from headrace_gateway.requests.body import SMALL_BYTES, model_named, read_object
from headrace_gateway.requests.body_process import BodyProcess
from headrace_gateway.requests.call import Call
from headrace_gateway.requests.request_size import request_bytes
from headrace_gateway.responses.endpoints import RESPONSES
from headrace_gateway.settings import MAX_BODY_BYTES
from headrace_wire.codes import BatchCode, ErrorCode, GatewayCode
from headrace_wire.values import named, shown

MAX_LINE_BYTES: Final = MAX_BODY_BYTES
MAX_CUSTOM_ID: Final = 512
ENDPOINTS: Final[Mapping[str, Api | PoolingApi]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/rerank": RERANK,
    "/v1/score": SCORE,
    "/v1/classify": CLASSIFY,
    "/v1/decisions": DECISIONS,
}
"""The accepted values of `url`."""
_FIELDS: Final = ("custom_id", "method", "url", "body")
_INPUTS: Final = ("input", "documents", "text_2", "items", "data_2")
"""The fields of pooling calls that have one element for each row of the answer."""
_ENCODE: Final = msgspec.json.Encoder().encode
_MOST_DEATHS: Final = 3
"""Attempts to read a line. The reading process may die of the line, or a service manager may kill all processes."""

Value = TypeVar("Value")


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch. Its body is parsed again where it is needed, so that no parsed body stays in memory."""

    custom_id: str
    url: str
    model: str | None
    """The model that the body names; None if it names none."""
    id: str
    """Id of the answer line: a digest of the request, so it identifies this request alone."""
    raw: bytes
    """The whole line."""
    num_inputs: int = 0
    """Inputs of a pooling call, by their number in the body."""

    @property
    def api(self) -> Api | PoolingApi:
        return ENDPOINTS[self.url]

    @property
    def task(self) -> str:
        """The task that the model must serve."""
        return self.api.task if isinstance(self.api, PoolingApi) else "generate"

    def answered(
        self,
        status: int,
        request_id: str,
        body: Mapping[str, Any],
        ignored: Collection[str] = (),
        truncated: Sequence[int] = (),
    ) -> bytes:
        """Return the line of an answer, with its line feed.

        Args:
            ignored: the fields of the body without effect.
            truncated: the indices of the inputs that were cut.
        """
        response: dict[str, Any] = {"status_code": status, "request_id": request_id, "body": body}
        response |= {"ignored": list(ignored)} if ignored else {}
        return self._line(response | ({"truncated": list(truncated)} if truncated else {}), None)

    def unanswered(self, code: str, message: str) -> bytes:
        """Return the line of a request without an answer."""
        return self._line(None, {"code": code, "message": message})

    def _line(self, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
        line = {"id": self.id, "custom_id": self.custom_id, "response": response, "error": error}
        return encode_line(line) + b"\n"


def read_line(raw: bytes) -> BatchLine:
    """Parse a line of the input; `read_call` checks its body. Raises ApiError, with OpenAI's code if there is one."""
    if len(raw) > MAX_LINE_BYTES:
        raise invalid(f"the line must be at most {MAX_LINE_BYTES} bytes, got {len(raw)}", code=BatchCode.LINE_TOO_LARGE)
    line = _parsed(raw)
    custom_id, method, url, body = (line.get(name) for name in _FIELDS)
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters, got {shown(custom_id)}"
        raise invalid(message, code=BatchCode.INVALID_CUSTOM_ID, param="custom_id")
    if method != "POST":
        raise invalid(f"method must be POST, got {named(method)}", code=BatchCode.INVALID_METHOD, param="method")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise invalid(
            f"url must be {' or '.join(ENDPOINTS)}, got {named(url)}", code=BatchCode.INVALID_URL, param="url"
        )
    if not isinstance(body, dict):
        raise invalid(f"body must be a map, got {shown(body)}", param="body")
    if body.get("stream"):
        raise invalid(
            f"body.stream must be false or absent, got {shown(body['stream'])}: a batch does not stream",
            param="body.stream",
        )
    for name in line:
        if name not in _FIELDS:
            raise invalid(f"unknown field {name[:64]!r}", code=GatewayCode.UNSUPPORTED_PARAMETER, param=name[:64])
    digest = hashlib.blake2b(_ENCODE([custom_id, url, body]), digest_size=16).hexdigest()
    api = ENDPOINTS[url]
    num_inputs = _num_inputs(body) if isinstance(api, PoolingApi) and api.task != "decide" else 0
    return BatchLine(custom_id, url, model_named(body), f"batch_req_{digest}", raw, num_inputs)


def _num_inputs(body: Mapping[str, Any]) -> int:
    """Count the inputs of a pooling call. The body may be invalid."""
    values = (as_list(body.get(name)) for name in _INPUTS)
    return max((len(value) for value in values if isinstance(value, list)), default=1)


def read_call(raw: bytes, model: RegisteredModel, lora: str | None) -> Call | PoolingBody:
    """Check the body of a line that `read_line` accepts, as its endpoint does. Raises ApiError with every problem."""
    line = _parsed(raw)
    api, body = ENDPOINTS[line["url"]], line["body"]
    if isinstance(api, PoolingApi):
        if api is RERANK and is_tei(body):
            message = "body.texts is a field of TEI, whose answers are lists: use documents"
            raise invalid(message, code=ErrorCode.UNSUPPORTED, param="body.texts")
        return api.read_for(body, model=model, lora=lora)
    if api is RESPONSES:
        for name in ("background", "previous_response_id"):
            if body.get(name):
                message = f"body.{name} is not supported in a batch, whose responses are not stored"
                raise invalid(message, code=ErrorCode.UNSUPPORTED, param=f"body.{name}")
        body = {**body, "store": False}
    call = api.read(body, model=model, lora=lora)
    request_bytes(call, model)
    return call


def _parsed(raw: bytes) -> dict[str, Any]:
    return read_object(raw, "line", BatchCode.INVALID_JSON_LINE)


class LineReader:
    """Reads the lines of one key's batches, the large ones in the process that reads large bodies.

    Args:
        bodies: reads the large lines, one line of the key at a time. So a large request of the key waits for at most
            one line. None: this process reads the lines.
    """

    def __init__(self, bodies: BodyProcess | None, key: ApiKey) -> None:
        self._bodies: Final = bodies
        self._owner: Final = ("batches", key.name)

    async def line(self, raw: bytes) -> BatchLine:
        """Parse a line as `read_line` does. Raises ApiError."""
        return await self._read(raw, read_line)

    async def call(self, line: BatchLine, model: RegisteredModel, lora: str | None) -> Call | PoolingBody:
        """Check the body of a line as `read_call` does. Raises ApiError."""
        return await self._read(line.raw, partial(read_call, model=model, lora=lora))

    async def _read(self, raw: bytes, act: Callable[[bytes], Value]) -> Value:
        if self._bodies is None or len(raw) <= SMALL_BYTES:
            return act(raw)
        num_deaths = 0
        while True:
            try:
                async with self._bodies.turn(self._owner):
                    return await self._bodies.run(self._owner, raw, act)
            except ApiError as error:
                num_deaths += error.status == 500
                if error.status != 500 or num_deaths == _MOST_DEATHS:
                    raise
