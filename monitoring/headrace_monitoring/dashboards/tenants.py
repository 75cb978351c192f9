"""Dashboard of the tenants that `HEADRACE_TENANTS` names. All others count as "other"."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring.dashboards.expressions import mean, quantile, queue_level, rate, rate_by
from headrace_monitoring.dashboards.panels import Row, build, graph, stack


def dashboard() -> sdk.Dashboard:
    return build(
        "headrace-tenants",
        "Headrace: tenants",
        'Requests, tokens and waits by tenant. "other": not named by HEADRACE_TENANTS. "none": no tenant.',
        {"Share": _share(), "Service": _service(), "Usage ledger of all tenants": _usage()},
    )


def _share() -> Row:
    return {
        "Requests by tenant": stack(
            "Requests a second whose stream ended.", rate_by("tenant_requests_total", "tenant"), unit="reqps"
        ),
        "Generated tokens by tenant": stack(
            "Generated tokens a second of requests that have ended.",
            rate_by("tenant_tokens_total", "tenant", ',kind="generated"'),
            unit="suffix: tokens/s",
        ),
        "Prompt tokens by tenant": stack(
            "Prompt tokens a second of requests that have ended, including cached tokens.",
            rate_by("tenant_tokens_total", "tenant", ',kind="prompt"'),
            unit="suffix: tokens/s",
        ),
    }


def _usage() -> Row:
    return {
        "Requests of an hour by model": stack(
            "Requests of the usage ledger that ended in the last hour.",
            ("max by (model) (increase(headrace_usage_requests_total{@queue}[1h]))", "{{model}}"),
        ),
        "Tokens of an hour by kind": graph(
            "Tokens of the usage ledger in the last hour. Cached tokens are among those of prompts.",
            (
                "sum by (kind) (max by (model, kind) (increase(headrace_usage_tokens_total{@queue}[1h])))",
                "{{kind}}",
            ),
            unit="suffix: tokens",
        ),
    }


def _service() -> Row:
    failed = rate("tenant_requests_total", "tenant", ',outcome!~"stop|length"')
    queued = queue_level("tenant_queued_messages", "queue, tenant")
    return {
        "Waiting messages by tenant": stack(
            "Ready messages that a worker has sorted by tenant.",
            (f"sum by (tenant) ({queued})", "{{tenant}}"),
        ),
        "Queue wait by tenant, p95": graph(
            "From enqueue until a worker took the message.",
            (quantile(0.95, "tenant_queue_wait_seconds", "tenant"), "{{tenant}}"),
            unit="s",
        ),
        "Queue wait by tenant, mean": graph(
            "From enqueue until a worker took the message.",
            (mean("tenant_queue_wait_seconds", "tenant"), "{{tenant}}"),
            unit="s",
        ),
        "Requests not served, by tenant": stack(
            "Requests a second that were cancelled, expired or rejected, or ended with an error.",
            (failed, "{{tenant}}"),
            unit="reqps",
        ),
    }
