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
            "reqps",
            rate_by("gateway_http_requests_total", "endpoint"),
        ),
        "Requests by status": stack(
            "HTTP requests a second without probes; none: the client left before there was an answer.",
            "reqps",
            rate_by("gateway_http_requests_total", "status", ',endpoint!="probes"'),
        ),
        "Refusals by code": stack(
            "Requests a second that got an error before a stream began, by the code of the error.",
            "reqps",
            rate_by("gateway_refusals_total", "code"),
        ),
    }


def _streams() -> Row:
    return {
        "Time to the first byte": graph(
            "From an accepted call until its answer begins; an answer that is not streamed begins when it is whole.",
            "s",
            *quantiles("gateway_first_byte_seconds"),
        ),
        "Open streams": stack(
            "Event streams that are being written.",
            "none",
            ("sum by (instance) (headrace_gateway_open_streams{@gateway})", "{{instance}}"),
        ),
        "Rejoined streams": stack(
            "Streams a second that a client read again, from the start or behind the last event that it had.",
            "ops",
            rate_by("gateway_rejoins_total", "from"),
        ),
        "Open responses": graph(
            "Responses of the Responses API whose end is to be stored or announced, of all replicas.",
            "none",
            ("max(headrace_gateway_responses_open{@gateway})", "open"),
        ),
        "Stored responses": stack(
            "Responses a second whose end was stored, by status.",
            "ops",
            rate_by("gateway_responses_stored_total", "status"),
        ),
    }


def _webhooks() -> Row:
    return {
        "Attempts to deliver": stack(
            "Attempts a second; failed: there is another attempt; gone: the receiver answered 410.",
            "ops",
            rate_by("gateway_webhook_deliveries_total", "outcome"),
        ),
        "Oldest undelivered webhook": graph(
            "Time since it was announced. All replicas share the webhooks and show the same.",
            "s",
            ("max(headrace_gateway_webhooks_oldest_undelivered_seconds{@gateway})", "oldest"),
        ),
        "Undelivered webhooks": graph(
            "Webhooks of enabled endpoints that wait in Redis, and endpoints that answered 410.",
            "none",
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
            "ops",
            rate_by("gateway_batch_lines_total", "outcome"),
        ),
        "Batches": graph(
            "Batches that each replica works on, and those of them that cannot use the directory of files.",
            "none",
            ("headrace_gateway_batches{@gateway}", "{{instance}}"),
            ("headrace_gateway_batches_waiting_for_storage{@gateway}", "waiting: {{instance}}"),
        ),
        "Time without an answer": graph(
            "Longest time for which a batch of each replica has got no answer of a line.",
            "s",
            ("headrace_gateway_batch_idle_seconds{@gateway}", "{{instance}}"),
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
            "none",
            ("sum by (version) (headrace_gateway_build_info{@gateway})", "{{version}}"),
        ),
        "Processor time": graph(
            "Cores that each replica uses; one process uses little more than one.",
            "none",
            ("rate(process_cpu_seconds_total{@gateway}[$__rate_interval])", "{{instance}}"),
        ),
        "Resident memory": graph(
            "Memory of each replica.", "bytes", ("process_resident_memory_bytes{@gateway}", "{{instance}}")
        ),
    }
