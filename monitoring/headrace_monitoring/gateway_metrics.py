"""`GatewayMetrics`: what a gateway tells Prometheus, in verbs that take plain values."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from headrace_monitoring import buckets, labels
from headrace_monitoring.exposition import ExpositionFormat, render
from headrace_monitoring.families import FamilyFactory


class WebhookFamilies:
    """Deliveries of webhooks by this replica, and the deliveries and endpoints of all replicas in Redis."""

    def __init__(self, make: FamilyFactory) -> None:
        self.file_valid = make.gauge(
            "gateway_webhook_file_valid",
            "0 while the webhook file cannot be used and the endpoints of an older one are in use.",
        )
        self.file_valid.set(1)
        self.attempts = make.counters(
            "gateway_webhook_deliveries_total",
            "Attempts to deliver a webhook; failed: there is another attempt; gone: status 410.",
            outcome=labels.WEBHOOK_OUTCOMES,
        )
        self.undelivered = make.gauge(
            "gateway_webhooks_undelivered", "Undelivered webhooks in Redis, of enabled endpoints."
        )
        self.oldest = make.gauge(
            "gateway_webhooks_oldest_undelivered_seconds",
            "Time since the oldest undelivered webhook was announced; 0: there is none.",
        )
        self.endpoints_disabled = make.gauge(
            "gateway_webhook_endpoints_disabled", "Webhook endpoints that answered 410 and are disabled."
        )


class GatewayMetrics:
    """All metrics of one gateway process, on one registry.

    Args:
        version: of Headrace.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, version: str = "unknown") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry() if registry is None else registry
        ProcessCollector(registry=self.registry)
        make = FamilyFactory(self.registry)
        make.gauges("gateway_build_info", "Version of the gateway.", version=(version,))[version].set(1)
        self._requests = make.grid(
            "gateway_http_requests_total",
            "HTTP requests answered, by endpoint and class of the status; none: the client left before.",
            endpoint=labels.ENDPOINTS,
            status=labels.STATUS_CLASSES,
        )
        self._refusals = make.counters(
            "gateway_refusals_total", "HTTP requests refused, by code of the error.", code=labels.REFUSALS
        )
        self._rejoins = make.counters(
            "gateway_rejoins_total",
            "Streams that a client read again, from their start or from a cursor.",
            **{"from": labels.REJOINS},
        )
        self._open_streams = make.gauge("gateway_open_streams", "Event streams that are being written.")
        self._first_byte = make.histogram(
            "gateway_first_byte_seconds",
            "Time from an accepted call until the first byte of its answer; of a whole answer or of a stream.",
            buckets.TIME_TO_FIRST_TOKEN,
        )
        self._responses_open = make.gauge(
            "gateway_responses_open",
            "Responses whose end is to be stored or announced, of all replicas; each reports the same.",
        )
        self._responses_stored = make.counters(
            "gateway_responses_stored_total", "Responses whose end was stored, by status.", status=labels.RESPONSE_ENDS
        )
        self._redis_up = make.gauge("gateway_redis_up", "1 while the gateway reaches Redis.")
        self._key_file_valid = make.gauge(
            "gateway_key_file_valid", "0 while the key file cannot be used and the keys of an older one are in use."
        )
        self._key_file_valid.set(1)
        self._webhooks = WebhookFamilies(make)
        self._batch_lines = make.counters(
            "gateway_batch_lines_total",
            "Lines of batches that got their answer or error, by outcome.",
            outcome=labels.BATCH_LINE_OUTCOMES,
        )
        self._batches = make.gauge("gateway_batches", "Batches that this replica works on.")
        self._batches_waiting = make.gauge(
            "gateway_batches_waiting_for_storage",
            "Batches of this replica that cannot write to the directory of files, or read it.",
        )
        self._batch_idle = make.gauge(
            "gateway_batch_idle_seconds",
            "Longest time for which a batch of this replica has received no answer.",
        )

    def answered(self, endpoint: labels.Endpoint, status: int | None) -> None:
        """An answer ended; `status` is None where the client left before there was one."""
        status_class = "none" if status is None else f"{status // 100}xx"
        self._requests[endpoint, status_class].inc()

    def refused(self, code: str | None) -> None:
        """A request got an error; a code outside the set is counted as "other"."""
        self._refusals[code if code in self._refusals else labels.OTHER].inc()

    def rejoined(self, origin: labels.Rejoin) -> None:
        """A stream is read again."""
        self._rejoins[origin].inc()

    def stream_opened(self) -> None:
        self._open_streams.inc()

    def stream_closed(self) -> None:
        self._open_streams.dec()

    def first_byte(self, seconds: float) -> None:
        """An answer of a generation began."""
        self._first_byte.observe(seconds)

    def responses_open(self, count: int) -> None:
        self._responses_open.set(count)

    def response_stored(self, status: str) -> None:
        """This replica stored how a response ended."""
        self._responses_stored[status].inc()

    def redis_answers(self, *, up: bool) -> None:
        self._redis_up.set(up)

    def key_file_read(self, *, valid: bool) -> None:
        """A new version of the key file was looked at."""
        self._key_file_valid.set(valid)

    def webhook_file_read(self, *, valid: bool) -> None:
        """A new version of the webhook file was looked at."""
        self._webhooks.file_valid.set(valid)

    def webhook_attempted(self, outcome: labels.WebhookOutcome) -> None:
        """An attempt to deliver a webhook ended."""
        self._webhooks.attempts[outcome].inc()

    def webhooks_waiting(self, *, undelivered: int, oldest_seconds: float, disabled: int) -> None:
        """What Redis holds for all replicas."""
        self._webhooks.undelivered.set(undelivered)
        self._webhooks.oldest.set(oldest_seconds)
        self._webhooks.endpoints_disabled.set(disabled)

    def batch_line(self, outcome: labels.BatchLineOutcome) -> None:
        self._batch_lines[outcome].inc()

    def batches(self, count: int, waiting_for_storage: int, idle_seconds: float) -> None:
        """What this replica works on now."""
        self._batches.set(count)
        self._batches_waiting.set(waiting_for_storage)
        self._batch_idle.set(idle_seconds)

    def exposition(self, form: ExpositionFormat = ExpositionFormat.TEXT) -> bytes:
        """What Prometheus scrapes."""
        return render(self.registry, form)
