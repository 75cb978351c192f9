"""The Celery application of producers and workers: all of Celery's configuration is here."""

from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import quote

from celery import Celery
from kombu import Exchange, Queue

from headrace_broker.content import SERIALIZERS
from headrace_broker.keys import QUEUE_PREFIX, REAPER_SECONDS, queue_name
from headrace_broker.server.sentinel import FAILOVER_SECONDS, SENTINEL_TIMEOUTS
from headrace_broker.server.url import ServerUrl
from headrace_broker.settings import BrokerSettings
from headrace_wire.codes import PRIORITY_STEPS

LEASE_TRANSPORT: Final = "headrace_broker.queue.transport:Transport"
_LEASE_TRANSPORTS: Final = {
    "tcp": LEASE_TRANSPORT,
    "unix": "headrace_broker.queue.server_transports:SocketTransport",
    "sentinel": "headrace_broker.queue.server_transports:SentinelTransport",
}

_PUBLISH_PAUSE: Final = 0.5
"""The longest pause between two attempts to send a message, in seconds."""

# Celery requires a default queue. It stays empty, because every message names the queue of its model.
_DEFAULT_QUEUE: Final = f"{QUEUE_PREFIX}default"


def make_app(settings: BrokerSettings, *, worker: bool = False, models: Iterable[str] = ()) -> Celery:
    """Make a Celery application for the queue.

    A worker takes messages from the queues of `models`, through the lease transport. A producer's connections time out
    after a few seconds when the server is dead.
    """
    server = settings.server
    broker, backend = _celery_urls(server, worker=worker)
    app = Celery("headrace", broker=broker, backend=backend, set_as_current=worker)
    # The exchanges are explicit, because Celery would bind all queues to the exchange of the default queue.
    queues = [Queue(name, Exchange(name), routing_key=name) for name in map(queue_name, models)]
    app.conf.update(
        # no pickle, which would let a producer run code in the worker
        accept_content=list(SERIALIZERS.values()),
        task_serializer="msgpack",
        result_serializer="msgpack",
        # Flower and `celery events` can read JSON without this application's configuration
        event_serializer="json",
        task_default_queue=queues[0].name if queues else _DEFAULT_QUEUE,
        task_queues=queues or None,
        task_create_missing_queues=False,
        result_expires=settings.result_ttl_seconds,
        broker_connection_timeout=5,
        # behind Sentinels a producer waits for the next master, as the client's reads do
        task_publish_retry_policy={
            "max_retries": int(FAILOVER_SECONDS / _PUBLISH_PAUSE) if server.kind == "sentinel" else 2,
            "interval_start": 0.1,
            "interval_step": 0.2,
            "interval_max": _PUBLISH_PAUSE,
        },
        broker_transport_options=_worker_options(settings) if worker else _producer_options(),
    )
    if worker:
        app.conf.update(broker_transport=_LEASE_TRANSPORTS[server.kind], **_WORKER_CONFIG)
    if server.kind == "sentinel":
        _configure_sentinel(app, server)
    return app


def _celery_urls(server: ServerUrl, *, worker: bool) -> tuple[str, str]:
    """Return the URLs of the broker and the result backend in Celery's spelling."""
    match server.kind:
        case "tcp":
            return server.text, server.text
        case "unix":
            socket = f"socket://{server.userinfo}{quote(server.path)}?virtual_host={server.db}"
            # a scheme with a plus selects kombu's own transport, but a worker uses the lease transport
            return socket if worker else f"redis+{socket}", f"redis+{socket}"
        case "sentinel":
            addresses = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in server.hosts]
            urls = [f"sentinel://{server.userinfo}{address}/{server.db}" for address in addresses]
            # After a failure kombu switches to the transport that the next URL names, so a worker gets only one URL.
            return urls[0] if worker else ";".join(urls), ";".join(urls)
        case "cluster":
            raise AssertionError("BrokerSettings refuses a Redis Cluster")


def _configure_sentinel(app: Celery, server: ServerUrl) -> None:
    sentinel = {"master_name": server.master, "sentinel_kwargs": {**SENTINEL_TIMEOUTS, **server.sentinel_options}}
    app.conf.broker_transport_options |= {**sentinel, "sentinels": server.hosts}
    app.conf.result_backend_transport_options = sentinel
    if server.tls:
        app.conf.broker_use_ssl = app.conf.redis_backend_use_ssl = server.tls_options


_WORKER_CONFIG: Final[dict[str, Any]] = {
    "task_acks_late": True,
    "worker_prefetch_multiplier": 1,
    "worker_send_task_events": True,
    "worker_hijack_root_logger": False,
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    # 0, because a soft shutdown sleeps in the signal handler, on the thread that renews leases
    "worker_soft_shutdown_timeout": 0,
    # a worker outlives any outage of its Redis
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    # retry the errors of a server that is read-only or out of memory for a while
    "broker_channel_error_retry": True,
}


def _producer_options() -> dict[str, Any]:
    return {
        "priority_steps": list(PRIORITY_STEPS),
        "socket_timeout": 10,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
    }


def _worker_options(settings: BrokerSettings) -> dict[str, Any]:
    return {
        "priority_steps": list(PRIORITY_STEPS),
        "queue_order_strategy": "priority",
        "lease_seconds": settings.lease_seconds,
        "delivery_limit": settings.delivery_limit,
        "tenant_weights": settings.weights,
        "ageing_seconds": settings.ageing_seconds,
        "queue_urls": settings.url_by_queue,
        "prefix_affinity": settings.prefix_affinity,
        "prefix_grace": settings.prefix_grace,
        "tenant_order": settings.order,
        "usage_days": settings.usage_days,
        "result_seconds": settings.result_ttl_seconds,
        "tenant_quota": settings.max_queued_requests_per_tenant,
        # kombu's timer for restoring messages also drives the reaping of expired leases
        "unacked_restore_interval": REAPER_SECONDS,
        "unacked_restore_throttle": 1,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
    }
