"""Tenants: who sends the work, and who waits. Those that `HEADRACE_TENANTS` names; all others count as "other"."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring.dashboards.expressions import mean, quantile, queue_level, rate
from headrace_monitoring.dashboards.panels import Panel, build, graph


def dashboard() -> sdk.Dashboard:
    return build(
        "headrace-tenants",
        "Headrace: tenants",
        'Requests, tokens and waits by tenant. Tenants without a series of their own are "other", none is "none".',
        {"Share": _share(), "Service": _service()},
    )


def _share() -> list[Panel]:
    return [
        graph(
            "Requests by tenant",
            "Requests a second whose stream ended.",
            "reqps",
            [(rate("tenant_requests_total", "tenant"), "{{tenant}}")],
            stacked=True,
        ),
        graph(
            "Generated tokens by tenant",
            "Tokens a second of requests that have ended.",
            "suffix: tokens/s",
            [(rate("tenant_tokens_total", "tenant", ',kind="generated"'), "{{tenant}}")],
            stacked=True,
        ),
        graph(
            "Prompt tokens by tenant",
            "Tokens a second of requests that have ended, cached ones among them.",
            "suffix: tokens/s",
            [(rate("tenant_tokens_total", "tenant", ',kind="prompt"'), "{{tenant}}")],
            stacked=True,
        ),
    ]


def _service() -> list[Panel]:
    failed = rate("tenant_requests_total", "tenant", ',outcome!~"stop|length"')
    queued = queue_level("tenant_queued_messages", "queue, tenant")
    return [
        graph(
            "Waiting messages by tenant",
            "Messages in the queue, without those that no worker has sorted yet.",
            "none",
            [(f"sum by (tenant) ({queued})", "{{tenant}}")],
            stacked=True,
        ),
        graph(
            "Queue wait by tenant, p95",
            "From enqueue until a worker took the message.",
            "s",
            [(quantile(0.95, "tenant_queue_wait_seconds", "tenant"), "{{tenant}}")],
        ),
        graph(
            "Queue wait by tenant, mean",
            "From enqueue until a worker took the message.",
            "s",
            [(mean("tenant_queue_wait_seconds", "tenant"), "{{tenant}}")],
        ),
        graph(
            "Requests not served, by tenant",
            "Requests a second that were cancelled, expired, refused, or ended with an error.",
            "reqps",
            [(failed, "{{tenant}}")],
            stacked=True,
        ),
    ]
