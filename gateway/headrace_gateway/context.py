"""The state that the endpoints of one gateway share."""

import asyncio
from dataclasses import dataclass, field

import redis.asyncio
from starlette.requests import Request

from headrace_broker import AsyncClient
from headrace_broker.client.tokenizer_calls import TokenizerClient
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_broker.streams.hub import StreamHub
from headrace_gateway.answers.envelope import EnvelopeStore
from headrace_gateway.answers.response_store import ResponseStore
from headrace_gateway.errors import ApiError
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.keys.daily_budgets import DailyBudgets
from headrace_gateway.keys.limits import BODIES_AT_ONCE, BodyBytes, RateLimits, StoredBytes
from headrace_gateway.keys.model_catalog import ModelCatalog, QueueView
from headrace_gateway.redis.read_requests import ReadRequests
from headrace_gateway.requests.body_process import BodyProcess
from headrace_gateway.settings import GatewaySettings
from headrace_gateway.webhooks.event_publisher import Webhooks
from headrace_monitoring.gateway_metrics import GatewayMetrics
from headrace_wire.codes import GatewayCode


@dataclass(slots=True)
class Gateway:
    """The connections and the state of one process. `app.py` makes it when the server starts.

    The stores of files and batches are not here, but in `app.state.files` and `app.state.batches`.
    """

    settings: GatewaySettings
    client: AsyncClient
    redis: "redis.asyncio.Redis"
    streams: AsyncStreamServers
    models: ModelCatalog
    envelopes: EnvelopeStore
    hub: StreamHub
    metrics: GatewayMetrics
    limits: RateLimits
    responses: ResponseStore
    tokenizers: TokenizerClient
    webhooks: Webhooks
    stored: StoredBytes = field(init=False)
    read: ReadRequests = field(init=False)
    bodies: BodyProcess = field(default_factory=BodyProcess)
    body_bytes: BodyBytes = field(init=False)
    queues: QueueView = field(init=False)
    budgets: DailyBudgets = field(init=False)
    searching: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while all messages are searched for one request: one search at a time."""

    def __post_init__(self) -> None:
        self.body_bytes = BodyBytes(BODIES_AT_ONCE * self.settings.max_body_bytes)
        self.queues = QueueView(self.client)
        self.budgets = DailyBudgets(self.client)
        self.read = ReadRequests(self.streams)
        self.stored = StoredBytes(self.redis, self.settings.max_stored_bytes, self.streams)


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def key_of(request: Request) -> ApiKey:
    """Return the caller's key, which the authentication middleware has put into the scope."""
    key: ApiKey = request.scope["state"]["key"]
    return key


def require_admin(request: Request, what: str) -> None:
    """Raise ApiError 403 unless the caller's key is an admin key. `what` needs one, for the message."""
    if not key_of(request).is_admin:
        message = f"the key {key_of(request).name!r} is not an admin key, but {what} needs one"
        raise ApiError(403, "permission_error", GatewayCode.ADMIN_KEY_REQUIRED, message)
