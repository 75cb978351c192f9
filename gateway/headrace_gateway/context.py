"""The state that the endpoints of one gateway share."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import redis.asyncio
from starlette.requests import Request

from headrace_broker import AsyncClient
from headrace_broker.stream_hub import StreamHub
from headrace_broker.tokenizer_calls import TokenizerClient
from headrace_gateway.keys import ApiKey
from headrace_gateway.queue_view import QueueView
from headrace_gateway.rate_limits import RateLimits
from headrace_gateway.settings import GatewaySettings
from headrace_gateway.webhooks.announcer import Webhooks
from headrace_monitoring.gateway_metrics import GatewayMetrics

if TYPE_CHECKING:
    from headrace_gateway.batch.batch_store import BatchStore
    from headrace_gateway.envelope import EnvelopeStore
    from headrace_gateway.files.stored_files import StoredFiles
    from headrace_gateway.model_catalog import ModelCatalog
    from headrace_gateway.response_store import ResponseStore


@dataclass(slots=True)
class Gateway:
    """The connections and the state of one process. `app.py` makes it when the server starts."""

    settings: GatewaySettings
    client: AsyncClient
    redis: "redis.asyncio.Redis"
    models: "ModelCatalog"
    envelopes: "EnvelopeStore"
    hub: StreamHub
    metrics: GatewayMetrics
    limits: RateLimits
    responses: "ResponseStore"
    tokenizers: TokenizerClient
    webhooks: Webhooks
    files: "StoredFiles | None"
    batches: "BatchStore"
    queues: QueueView = field(init=False)

    def __post_init__(self) -> None:
        self.queues = QueueView(self.client)


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def key_of(request: Request) -> ApiKey:
    """Return the caller, whom the authentication middleware has put into the scope."""
    key: ApiKey = request.scope["state"]["key"]
    return key
