"""Dashboard of the gateway: requests, streams, batches, webhooks and replicas."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring.dashboards.expressions import quantiles, rate_by
from headrace_monitoring.dashboards.panels import Row, build, graph, stack, states


def dashboard() -> sdk.Dashboard:
    return build(
        "headrace-gateway",
        "Headrace: gateway",
        "HTTP requests, refusals, streams, batches, webhooks and replicas.",
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
            "HTTP requests a second. probes: health checks of load balancers and orchestrators.",
            rate_by("gateway_http_requests_total", "endpoint"),
            unit="reqps",
        ),
        "Requests by status": stack(
            "HTTP requests a second without probes. none: the client disconnected before the response.",
            rate_by("gateway_http_requests_total", "status", ',endpoint!="probes"'),
            unit="reqps",
        ),
        "Requests with ignored fields": stack(
            "Requests a second with fields that have no effect. The response header X-Headrace-Ignored names them.",
            rate_by("gateway_ignored_fields_total", "endpoint"),
            unit="reqps",
        ),
        "Refusals by code": stack(
            "Refused requests a second, by error code.",
            rate_by("gateway_refusals_total", "code"),
            unit="reqps",
        ),
    }


def _streams() -> Row:
    return {
        "Time to the first byte": graph(
            "From an accepted request until the first byte of its response, streamed or not.",
            *quantiles("gateway_first_byte_seconds"),
            unit="s",
        ),
        "Open streams": stack(
            "Open event streams to clients.",
            ("sum by (instance) (headrace_gateway_open_streams{@gateway})", "{{instance}}"),
        ),
        "Rejoined streams": stack(
            "Streams a second that a client read again, from the start or after its last event.",
            rate_by("gateway_rejoins_total", "from"),
            unit="ops",
        ),
        "Open responses": graph(
            "Responses of the Responses API whose end is not yet stored or announced, of all replicas.",
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
            "Attempts a second. failed: another attempt follows. given_up: no attempt follows.",
            rate_by("gateway_webhook_deliveries_total", "outcome"),
            unit="ops",
        ),
        "Oldest undelivered webhook": graph(
            "Age of the oldest undelivered webhook. All replicas share the webhooks and report the same value.",
            ("max(headrace_gateway_webhooks_oldest_undelivered_seconds{@gateway})", "oldest"),
            unit="s",
        ),
        "Undelivered webhooks": graph(
            "Webhooks that wait in Redis for their first or next attempt.",
            ("max(headrace_gateway_webhooks_undelivered{@gateway})", "undelivered"),
        ),
        "Webhook file valid": states(
            "Off: the webhook file is invalid, and the endpoints of the last valid one are in use.",
            ("headrace_gateway_webhook_file_valid{@gateway}", "{{instance}}"),
        ),
    }


def _batches() -> Row:
    return {
        "Lines by outcome": stack(
            "Completed lines of batches a second.",
            rate_by("gateway_batch_lines_total", "outcome"),
            unit="ops",
        ),
        "Batches": graph(
            "Batches that each replica processes. waiting: they cannot read or write the directory of files.",
            ("headrace_gateway_batches{@gateway}", "{{instance}}"),
            ("headrace_gateway_batches_waiting_for_storage{@gateway}", "waiting: {{instance}}"),
        ),
        "Time without an answer": graph(
            "Longest time without an answer among the batches of each replica.",
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
            "Off: the key file is invalid, and the keys of the last valid one are in use.",
            ("headrace_gateway_key_file_valid{@gateway}", "{{instance}}"),
        ),
        "Replicas by version": stack(
            "Replicas that Prometheus reaches.",
            ("sum by (version) (headrace_gateway_build_info{@gateway})", "{{version}}"),
        ),
        "Processor time": graph(
            "CPU cores that each replica uses. One replica uses little more than one core.",
            ("rate(process_cpu_seconds_total{@gateway}[$__rate_interval])", "{{instance}}"),
        ),
        "Resident memory": graph(
            "Memory of each replica.", ("process_resident_memory_bytes{@gateway}", "{{instance}}"), unit="bytes"
        ),
    }
