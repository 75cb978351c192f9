"""The gateway: what callers ask over HTTP, what they get, and how fast it begins. It knows no model and no worker."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring.dashboards.expressions import quantiles, rate_by
from headrace_monitoring.dashboards.panels import Row, build, graph, stack, states


def dashboard() -> sdk.Dashboard:
    return build(
        "headrace-gateway",
        "Headrace: gateway",
        "OpenAI's API over HTTP: requests, refusals, streams, and what each replica needs.",
        {
            "Requests": _requests(),
            "Streams": _streams(),
            "Batches": _batches(),
            "Webhooks": _webhooks(),
            "Replicas": _replicas(),
        },
    )


def _requests() -> Row:
    return {
        "Requests by endpoint": stack(
            "HTTP requests a second; probes are those of balancers and orchestrators.",
            rate_by("gateway_http_requests_total", "endpoint"),
            unit="reqps",
        ),
        "Requests by status": stack(
            "HTTP requests a second without probes; none: the client left before there was an answer.",
            rate_by("gateway_http_requests_total", "status", ',endpoint!="probes"'),
            unit="reqps",
        ),
        "Refusals by code": stack(
            "Requests a second that got an error before a stream began, by the code of the error.",
            rate_by("gateway_refusals_total", "code"),
            unit="reqps",
        ),
    }


def _streams() -> Row:
    return {
        "Time to the first byte": graph(
            "From an accepted call until its answer begins; an answer that is not streamed begins when it is whole.",
            *quantiles("gateway_first_byte_seconds"),
            unit="s",
        ),
        "Open streams": stack(
            "Event streams that are being written.",
            ("sum by (instance) (headrace_gateway_open_streams{@gateway})", "{{instance}}"),
        ),
        "Rejoined streams": stack(
            "Streams a second that a client read again, from the start or behind the last event that it had.",
            rate_by("gateway_rejoins_total", "from"),
            unit="ops",
        ),
        "Open responses": graph(
            "Responses of the Responses API whose end is to be stored or announced, of all replicas.",
            ("max(headrace_gateway_responses_open{@gateway})", "open"),
        ),
        "Stored responses": stack(
            "Responses a second whose end was stored, by status.",
            rate_by("gateway_responses_stored_total", "status"),
            unit="ops",
        ),
    }


def _webhooks() -> Row:
    return {
        "Attempts to deliver": stack(
            "Attempts a second; failed: there is another attempt; gone: the receiver answered 410.",
            rate_by("gateway_webhook_deliveries_total", "outcome"),
            unit="ops",
        ),
        "Oldest undelivered webhook": graph(
            "Time since it was announced. All replicas share the webhooks and show the same.",
            ("max(headrace_gateway_webhooks_oldest_undelivered_seconds{@gateway})", "oldest"),
            unit="s",
        ),
        "Undelivered webhooks": graph(
            "Webhooks of enabled endpoints that wait in Redis, and endpoints that answered 410.",
            ("max(headrace_gateway_webhooks_undelivered{@gateway})", "undelivered"),
            ("max(headrace_gateway_webhook_endpoints_disabled{@gateway})", "disabled endpoints"),
        ),
        "Webhook file valid": states(
            "Off: the webhook file cannot be used, and the endpoints of an older one are in use.",
            ("headrace_gateway_webhook_file_valid{@gateway}", "{{instance}}"),
        ),
    }


def _batches() -> Row:
    return {
        "Lines by outcome": stack(
            "Lines of batches a second that got their answer or error.",
            rate_by("gateway_batch_lines_total", "outcome"),
            unit="ops",
        ),
        "Batches": graph(
            "Batches that each replica works on, and those of them that cannot use the directory of files.",
            ("headrace_gateway_batches{@gateway}", "{{instance}}"),
            ("headrace_gateway_batches_waiting_for_storage{@gateway}", "waiting: {{instance}}"),
        ),
        "Time without an answer": graph(
            "Longest time for which a batch of each replica has got no answer of a line.",
            ("headrace_gateway_batch_idle_seconds{@gateway}", "{{instance}}"),
            unit="s",
        ),
    }


def _replicas() -> Row:
    return {
        "Redis reached": states(
            "Whether each replica reaches Redis.", ("headrace_gateway_redis_up{@gateway}", "{{instance}}")
        ),
        "Key file valid": states(
            "Off: the key file cannot be used, and the keys of an older one are in use.",
            ("headrace_gateway_key_file_valid{@gateway}", "{{instance}}"),
        ),
        "Replicas by version": stack(
            "Replicas that Prometheus reaches.",
            ("sum by (version) (headrace_gateway_build_info{@gateway})", "{{version}}"),
        ),
        "Processor time": graph(
            "Cores that each replica uses; one process uses little more than one.",
            ("rate(process_cpu_seconds_total{@gateway}[$__rate_interval])", "{{instance}}"),
        ),
        "Resident memory": graph(
            "Memory of each replica.", ("process_resident_memory_bytes{@gateway}", "{{instance}}"), unit="bytes"
        ),
    }
