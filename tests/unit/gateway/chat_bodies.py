"""Chat bodies with a few fields of their own, what is read from them, and tools for them."""

from typing import Any

from headrace_broker import RegisteredModel
from headrace_gateway.chat.fields import read_chat
from headrace_gateway.errors import ApiError
from headrace_gateway.requests.call import Call, ChatOptions
from unit.gateway.bodies import CHAT, model, refusal

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
PAINT: dict[str, Any] = {"type": "function", "function": {"name": "paint", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "paint"}}
HERMES = model(tool_parser="hermes")


def read(registered: RegisteredModel | None = None, **fields: Any) -> Call:
    return read_chat({**CHAT, **fields}, model=registered or model(), lora=None)


def sampling(registered: RegisteredModel | None = None, **fields: Any) -> dict[str, Any]:
    return dict(read(registered, **fields).requests[0].sampling_params)


def options(registered: RegisteredModel | None = None, **fields: Any) -> ChatOptions:
    made = read(registered, **fields).options
    assert isinstance(made, ChatOptions)
    return made


def wrong(registered: RegisteredModel | None = None, **fields: Any) -> ApiError:
    return refusal(read_chat, {**CHAT, **fields}, model=registered or model(), lora=None)
