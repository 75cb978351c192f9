"""The client side of Headrace's queue: submit requests, follow their streams, fetch results.

    from headrace_broker import Client

    client = Client("redis://127.0.0.1:6379/0", model="my-model")
    request_id = client.submit("Once upon a time", {"max_tokens": 64})
    for chunk in client.stream(request_id):
        print(chunk.text, end="", flush=True)

The package needs no torch. This module does not import the modules that only a worker needs (`leases`, `transport`).
"""

from headrace_broker.app import make_app
from headrace_broker.async_client import AsyncClient
from headrace_broker.client import Client
from headrace_broker.dead_letters import DeadLetter
from headrace_broker.errors import (
    EmbeddedServerError,
    HeadraceBrokerError,
    InvalidRequestError,
    MalformedEntryError,
    QueueFullError,
    QueueUnavailableError,
    RequestFailedError,
    ResultTimeoutError,
    SettingsError,
    StreamExpiredError,
    TenantQueueFullError,
    TransportConfigurationError,
    UnknownModelError,
)
from headrace_broker.events import ChunkEvent, EndEvent, StartEvent, StreamEvent
from headrace_broker.messages import GenerateRequest
from headrace_broker.model_traits import TemplateTraits
from headrace_broker.queue_levels import QueueLevels
from headrace_broker.registry import RegisteredModel
from headrace_broker.results import CompletionOutput, ErrorInfo, GenerateResult, Logprob, Usage
from headrace_broker.settings import BrokerSettings
from headrace_broker.submission import RequestStatus, SubmitOptions, SubmitRequest

__all__ = [
    "AsyncClient",
    "BrokerSettings",
    "ChunkEvent",
    "Client",
    "CompletionOutput",
    "DeadLetter",
    "EmbeddedServerError",
    "EndEvent",
    "ErrorInfo",
    "GenerateRequest",
    "GenerateResult",
    "HeadraceBrokerError",
    "InvalidRequestError",
    "Logprob",
    "MalformedEntryError",
    "QueueFullError",
    "QueueLevels",
    "QueueUnavailableError",
    "RegisteredModel",
    "RequestFailedError",
    "RequestStatus",
    "ResultTimeoutError",
    "SettingsError",
    "StartEvent",
    "StreamEvent",
    "StreamExpiredError",
    "SubmitOptions",
    "SubmitRequest",
    "TemplateTraits",
    "TenantQueueFullError",
    "TransportConfigurationError",
    "UnknownModelError",
    "Usage",
    "make_app",
]
