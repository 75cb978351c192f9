"""`GatewayMetrics`: the metrics of a gateway, one method for each event."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from headrace_monitoring import buckets, labels
from headrace_monitoring.exposition import ExpositionFormat, render
from headrace_monitoring.families import FamilyFactory


class WebhookFamilies:
    """Deliveries of webhooks by this replica, and the deliveries of all replicas in Redis."""

    def __init__(self, make: FamilyFactory) -> None:
        self.file_valid = make.gauge(
            "gateway_webhook_file_valid",
            "0 while the webhook file is invalid and the endpoints of the last valid one are in use.",
        )
        self.file_valid.set(1)
        self.attempts = make.counters(
            "gateway_webhook_deliveries_total",
            "Attempts to deliver a webhook. failed: another attempt follows. given_up: no attempt follows.",
            outcome=labels.WEBHOOK_OUTCOMES,
        )
        self.undelivered = make.gauge("gateway_webhooks_undelivered", "Undelivered webhooks in Redis.")
        self.oldest = make.gauge(
            "gateway_webhooks_oldest_undelivered_seconds",
            "Age of the oldest undelivered webhook; 0: there is none.",
        )


class GatewayMetrics:
    """All metrics of one gateway process, on one registry.

    Args:
        version: version of Headrace.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, version: str = "unknown") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry() if registry is None else registry
        ProcessCollector(registry=self.registry)
        make = FamilyFactory(self.registry)
        make.gauges("gateway_build_info", "Version of the gateway.", version=(version,))[version].set(1)
        self._requests = make.grid(
            "gateway_http_requests_total",
            "HTTP requests by endpoint and class of the status; none: the client disconnected before the response.",
            endpoint=labels.ENDPOINTS,
            status=labels.STATUS_CLASSES,
        )
        self._refusals = make.counters(
            "gateway_refusals_total", "HTTP requests refused, by code of the error.", code=labels.REFUSALS
        )
        self._ignored = make.counters(
            "gateway_ignored_fields_total",
            "HTTP requests with fields that were ignored, by endpoint.",
            endpoint=labels.ENDPOINTS,
        )
        self._rejoins = make.counters(
            "gateway_rejoins_total",
            "Streams that a client read again, from their start or from a cursor.",
            **{"from": labels.REJOINS},
        )
        self._open_streams = make.gauge("gateway_open_streams", "Open event streams to clients.")
        self._first_byte = make.histogram(
            "gateway_first_byte_seconds",
            "Time from an accepted request until the first byte of its response, streamed or not.",
            buckets.TIME_TO_FIRST_TOKEN,
        )
        self._responses_open = make.gauge(
            "gateway_responses_open",
            "Responses of all replicas whose end is not yet stored or announced; each replica reports the same number.",
        )
        self._responses_stored = make.counters(
            "gateway_responses_stored_total", "Responses whose end was stored, by status.", status=labels.RESPONSE_ENDS
        )
        self._redis_up = make.gauge("gateway_redis_up", "1 while the gateway reaches Redis.")
        self._key_file_valid = make.gauge(
            "gateway_key_file_valid", "0 while the key file is invalid and the keys of the last valid one are in use."
        )
        self._key_file_valid.set(1)
        self._webhooks = WebhookFamilies(make)
        self._batch_lines = make.counters(
            "gateway_batch_lines_total",
            "Completed lines of batches, by outcome.",
            outcome=labels.BATCH_LINE_OUTCOMES,
        )
        self._batches = make.gauge("gateway_batches", "Batches that this replica processes.")
        self._batches_waiting = make.gauge(
            "gateway_batches_waiting_for_storage",
            "Batches of this replica that cannot read or write the directory of files.",
        )
        self._batch_idle = make.gauge(
            "gateway_batch_idle_seconds",
            "Longest time without an answer among the batches of this replica.",
        )

    def answered(self, endpoint: labels.Endpoint, status: int | None) -> None:
        """Count a response. `status` is None if the client disconnected before it."""
        status_class = "none" if status is None else f"{status // 100}xx"
        self._requests[endpoint, status_class].inc()

    def refused(self, code: str | None) -> None:
        """Count a refused request. A code that is not in the set counts as "other"."""
        self._refusals[code if code in self._refusals else labels.OTHER].inc()

    def fields_ignored(self, endpoint: labels.Endpoint) -> None:
        """Count a request with fields that have no effect. A header of its response names them."""
        self._ignored[endpoint].inc()

    def rejoined(self, origin: labels.Rejoin) -> None:
        """Count a stream that a client reads again."""
        self._rejoins[origin].inc()

    def stream_opened(self) -> None:
        self._open_streams.inc()

    def stream_closed(self) -> None:
        self._open_streams.dec()

    def first_byte(self, seconds: float) -> None:
        """Record the time to the first byte of a generation's response."""
        self._first_byte.observe(seconds)

    def responses_open(self, count: int) -> None:
        self._responses_open.set(count)

    def response_stored(self, status: str) -> None:
        """Count a response whose end this replica stored."""
        self._responses_stored[status].inc()

    def redis_answers(self, *, up: bool) -> None:
        self._redis_up.set(up)

    def key_file_read(self, *, valid: bool) -> None:
        """Record whether the newest version of the key file is valid."""
        self._key_file_valid.set(valid)

    def webhook_file_read(self, *, valid: bool) -> None:
        """Record whether the newest version of the webhook file is valid."""
        self._webhooks.file_valid.set(valid)

    def webhook_attempted(self, outcome: labels.WebhookOutcome) -> None:
        """Count an attempt to deliver a webhook."""
        self._webhooks.attempts[outcome].inc()

    def webhooks_waiting(self, *, undelivered: int, oldest_seconds: float) -> None:
        """Set the number and the age of undelivered webhooks in Redis, which all replicas share."""
        self._webhooks.undelivered.set(undelivered)
        self._webhooks.oldest.set(oldest_seconds)

    def batch_line(self, outcome: labels.BatchLineOutcome) -> None:
        self._batch_lines[outcome].inc()

    def batches(self, count: int, waiting_for_storage: int, idle_seconds: float) -> None:
        """Set the counts and the idle time of the batches that this replica processes."""
        self._batches.set(count)
        self._batches_waiting.set(waiting_for_storage)
        self._batch_idle.set(idle_seconds)

    def exposition(self, form: ExpositionFormat = ExpositionFormat.TEXT) -> bytes:
        """Return the response to a scrape."""
        return render(self.registry, form)
