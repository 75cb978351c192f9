"""The client side of Headrace's queue: submit requests, follow their streams, fetch results.

    from headrace_broker import Client

    client = Client("redis://127.0.0.1:6379/0", model="my-model")
    request_id = client.submit("Once upon a time", {"max_tokens": 64})
    for chunk in client.stream(request_id):
        print(chunk.text, end="", flush=True)

The package needs no torch. The public names are loaded on first use, so that an import of one module of the package is
fast. None of them imports what only a worker needs: the transport of `queue`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace_broker.app import make_app as make_app
    from headrace_broker.client.async_client import AsyncClient as AsyncClient
    from headrace_broker.client.client import Client as Client
    from headrace_broker.client.submission import RequestStatus as RequestStatus
    from headrace_broker.client.submission import SubmitOptions as SubmitOptions
    from headrace_broker.client.submission import SubmitRequest as SubmitRequest
    from headrace_broker.decisions import Decided as Decided
    from headrace_broker.decisions import DecideRequest as DecideRequest
    from headrace_broker.errors import EmbeddedServerError as EmbeddedServerError
    from headrace_broker.errors import HeadraceBrokerError as HeadraceBrokerError
    from headrace_broker.errors import InvalidRequestError as InvalidRequestError
    from headrace_broker.errors import MalformedEntryError as MalformedEntryError
    from headrace_broker.errors import QueueFullError as QueueFullError
    from headrace_broker.errors import QueueUnavailableError as QueueUnavailableError
    from headrace_broker.errors import ResultTimeoutError as ResultTimeoutError
    from headrace_broker.errors import SettingsError as SettingsError
    from headrace_broker.errors import StreamExpiredError as StreamExpiredError
    from headrace_broker.errors import StreamServerUnavailableError as StreamServerUnavailableError
    from headrace_broker.errors import TenantQueueFullError as TenantQueueFullError
    from headrace_broker.errors import TransportConfigurationError as TransportConfigurationError
    from headrace_broker.errors import UnknownModelError as UnknownModelError
    from headrace_broker.messages import GenerateRequest as GenerateRequest
    from headrace_broker.models.loading_models import LoadingModel as LoadingModel
    from headrace_broker.models.registry import RegisteredModel as RegisteredModel
    from headrace_broker.models.template_features import TemplateFeatures as TemplateFeatures
    from headrace_broker.pooling_messages import PoolingRequest as PoolingRequest
    from headrace_broker.pooling_results import Matrix as Matrix
    from headrace_broker.pooling_results import Pooled as Pooled
    from headrace_broker.pooling_results import RankedDocument as RankedDocument
    from headrace_broker.queue.dead_letters import DeadLetter as DeadLetter
    from headrace_broker.queue.levels import QueueLevels as QueueLevels
    from headrace_broker.results import ChoiceOutput as ChoiceOutput
    from headrace_broker.results import ErrorInfo as ErrorInfo
    from headrace_broker.results import GenerateResult as GenerateResult
    from headrace_broker.results import RequestFailedError as RequestFailedError
    from headrace_broker.results import TokenLogprob as TokenLogprob
    from headrace_broker.results import Usage as Usage
    from headrace_broker.settings import BrokerSettings as BrokerSettings
    from headrace_broker.streams.events import ChunkEvent as ChunkEvent
    from headrace_broker.streams.events import EndEvent as EndEvent
    from headrace_broker.streams.events import RowsEvent as RowsEvent
    from headrace_broker.streams.events import StartEvent as StartEvent
    from headrace_broker.streams.events import StreamEvent as StreamEvent

_HOMES = {
    "AsyncClient": "client.async_client",
    "BrokerSettings": "settings",
    "ChoiceOutput": "results",
    "ChunkEvent": "streams.events",
    "Client": "client.client",
    "DeadLetter": "queue.dead_letters",
    "DecideRequest": "decisions",
    "Decided": "decisions",
    "EmbeddedServerError": "errors",
    "EndEvent": "streams.events",
    "ErrorInfo": "results",
    "GenerateRequest": "messages",
    "GenerateResult": "results",
    "HeadraceBrokerError": "errors",
    "InvalidRequestError": "errors",
    "MalformedEntryError": "errors",
    "LoadingModel": "models.loading_models",
    "Matrix": "pooling_results",
    "Pooled": "pooling_results",
    "PoolingRequest": "pooling_messages",
    "QueueFullError": "errors",
    "QueueLevels": "queue.levels",
    "QueueUnavailableError": "errors",
    "RankedDocument": "pooling_results",
    "RegisteredModel": "models.registry",
    "RequestFailedError": "results",
    "RequestStatus": "client.submission",
    "ResultTimeoutError": "errors",
    "RowsEvent": "streams.events",
    "SettingsError": "errors",
    "StartEvent": "streams.events",
    "StreamEvent": "streams.events",
    "StreamExpiredError": "errors",
    "StreamServerUnavailableError": "errors",
    "SubmitOptions": "client.submission",
    "SubmitRequest": "client.submission",
    "TemplateFeatures": "models.template_features",
    "TenantQueueFullError": "errors",
    "TokenLogprob": "results",
    "TransportConfigurationError": "errors",
    "UnknownModelError": "errors",
    "Usage": "results",
    "make_app": "app",
}
__all__ = [*_HOMES]


if not TYPE_CHECKING:  # else type checkers accept any name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
