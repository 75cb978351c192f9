"""Tenants: who sends the work, and who waits. Those that `HEADRACE_TENANTS` names; all others count as "other"."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring.dashboards.expressions import mean, quantile, queue_level, rate, rate_by
from headrace_monitoring.dashboards.panels import Row, build, graph, stack


def dashboard() -> sdk.Dashboard:
    return build(
        "headrace-tenants",
        "Headrace: tenants",
        'Requests, tokens and waits by tenant. Tenants without a series of their own are "other", none is "none".',
        {"Share": _share(), "Service": _service()},
    )


def _share() -> Row:
    return {
        "Requests by tenant": stack(
            "Requests a second whose stream ended.", "reqps", rate_by("tenant_requests_total", "tenant")
        ),
        "Generated tokens by tenant": stack(
            "Tokens a second of requests that have ended.",
            "suffix: tokens/s",
            rate_by("tenant_tokens_total", "tenant", ',kind="generated"'),
        ),
        "Prompt tokens by tenant": stack(
            "Tokens a second of requests that have ended, cached ones among them.",
            "suffix: tokens/s",
            rate_by("tenant_tokens_total", "tenant", ',kind="prompt"'),
        ),
    }


def _service() -> Row:
    failed = rate("tenant_requests_total", "tenant", ',outcome!~"stop|length"')
    queued = queue_level("tenant_queued_messages", "queue, tenant")
    return {
        "Waiting messages by tenant": stack(
            "Messages in the queue, without those that no worker has sorted yet.",
            "none",
            (f"sum by (tenant) ({queued})", "{{tenant}}"),
        ),
        "Queue wait by tenant, p95": graph(
            "From enqueue until a worker took the message.",
            "s",
            (quantile(0.95, "tenant_queue_wait_seconds", "tenant"), "{{tenant}}"),
        ),
        "Queue wait by tenant, mean": graph(
            "From enqueue until a worker took the message.",
            "s",
            (mean("tenant_queue_wait_seconds", "tenant"), "{{tenant}}"),
        ),
        "Requests not served, by tenant": stack(
            "Requests a second that were cancelled, expired, refused, or ended with an error.",
            "reqps",
            (failed, "{{tenant}}"),
        ),
    }
