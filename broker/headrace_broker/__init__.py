"""The client side of Headrace's queue: submit requests, follow their streams, fetch results.

    from headrace_broker import Client

    client = Client("redis://127.0.0.1:6379/0", model="my-model")
    request_id = client.submit("Once upon a time", {"max_tokens": 64})
    for chunk in client.stream(request_id):
        print(chunk.text, end="", flush=True)

The package needs no torch. This module does not import what only a worker needs: the transport of `queue`.
"""

from headrace_broker.app import make_app
from headrace_broker.client.async_client import AsyncClient
from headrace_broker.client.client import Client
from headrace_broker.client.submission import RequestStatus, SubmitOptions, SubmitRequest
from headrace_broker.decisions import Decided, DecideRequest
from headrace_broker.errors import (
    EmbeddedServerError,
    HeadraceBrokerError,
    InvalidRequestError,
    MalformedEntryError,
    QueueFullError,
    QueueUnavailableError,
    ResultTimeoutError,
    SettingsError,
    StreamExpiredError,
    TenantQueueFullError,
    TransportConfigurationError,
    UnknownModelError,
)
from headrace_broker.messages import GenerateRequest
from headrace_broker.models.registry import RegisteredModel
from headrace_broker.models.template_features import TemplateFeatures
from headrace_broker.pooling_messages import PoolingRequest
from headrace_broker.pooling_results import Matrix, Pooled, RankedDocument
from headrace_broker.queue.dead_letters import DeadLetter
from headrace_broker.queue.levels import QueueLevels
from headrace_broker.results import ChoiceOutput, ErrorInfo, GenerateResult, RequestFailedError, TokenLogprob, Usage
from headrace_broker.settings import BrokerSettings
from headrace_broker.streams.events import ChunkEvent, EndEvent, RowsEvent, StartEvent, StreamEvent

__all__ = [
    "AsyncClient",
    "BrokerSettings",
    "ChoiceOutput",
    "ChunkEvent",
    "Client",
    "DeadLetter",
    "DecideRequest",
    "Decided",
    "EmbeddedServerError",
    "EndEvent",
    "ErrorInfo",
    "GenerateRequest",
    "GenerateResult",
    "HeadraceBrokerError",
    "InvalidRequestError",
    "MalformedEntryError",
    "Matrix",
    "Pooled",
    "PoolingRequest",
    "QueueFullError",
    "QueueLevels",
    "QueueUnavailableError",
    "RankedDocument",
    "RegisteredModel",
    "RequestFailedError",
    "RequestStatus",
    "ResultTimeoutError",
    "RowsEvent",
    "SettingsError",
    "StartEvent",
    "StreamEvent",
    "StreamExpiredError",
    "SubmitOptions",
    "SubmitRequest",
    "TemplateFeatures",
    "TenantQueueFullError",
    "TokenLogprob",
    "TransportConfigurationError",
    "UnknownModelError",
    "Usage",
    "make_app",
]
