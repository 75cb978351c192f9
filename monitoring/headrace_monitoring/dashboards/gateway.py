"""The gateway: what callers ask over HTTP, what they get, and how fast it begins. It knows no model and no worker."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring.dashboards.panels import Panel, build, graph, states

_JOB = 'job="headrace-gateway"'


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


def _requests() -> list[Panel]:
    return [
        graph(
            "Requests by endpoint",
            "HTTP requests a second; probes are those of balancers and orchestrators.",
            "reqps",
            [(_rate("http_requests_total", "endpoint"), "{{endpoint}}")],
            stacked=True,
        ),
        graph(
            "Requests by status",
            "HTTP requests a second without probes; none: the client left before there was an answer.",
            "reqps",
            [(_rate("http_requests_total", "status", ',endpoint!="probes"'), "{{status}}")],
            stacked=True,
        ),
        graph(
            "Refusals by code",
            "Requests a second that got an error before a stream began, by the code of the error.",
            "reqps",
            [(_rate("refusals_total", "code"), "{{code}}")],
            stacked=True,
        ),
    ]


def _streams() -> list[Panel]:
    buckets = _rate("first_byte_seconds_bucket", "le")
    mean = f"{_rate('first_byte_seconds_sum')} / {_rate('first_byte_seconds_count')}"
    return [
        graph(
            "Time to the first byte",
            "From an accepted call until its answer begins; an answer that is not streamed begins when it is whole.",
            "s",
            [
                *((f"histogram_quantile({q}, {buckets})", f"p{round(q * 100)}") for q in (0.5, 0.95, 0.99)),
                (mean, "mean"),
            ],
        ),
        graph(
            "Open streams",
            "Event streams that are being written.",
            "none",
            [(f"sum by (instance) (headrace_gateway_open_streams{{{_JOB}}})", "{{instance}}")],
            stacked=True,
        ),
        graph(
            "Rejoined streams",
            "Streams a second that a client read again, from the start or behind the last event that it had.",
            "ops",
            [(_rate("rejoins_total", "from"), "{{from}}")],
            stacked=True,
        ),
        graph(
            "Open responses",
            "Responses of the Responses API whose end is to be stored or announced, of all replicas.",
            "none",
            [(f"max(headrace_gateway_responses_open{{{_JOB}}})", "open")],
        ),
        graph(
            "Stored responses",
            "Responses a second whose end was stored, by status.",
            "ops",
            [(_rate("responses_stored_total", "status"), "{{status}}")],
            stacked=True,
        ),
    ]


def _webhooks() -> list[Panel]:
    return [
        graph(
            "Attempts to deliver",
            "Attempts a second; failed: there is another attempt; gone: the receiver answered 410.",
            "ops",
            [(_rate("webhook_deliveries_total", "outcome"), "{{outcome}}")],
            stacked=True,
        ),
        graph(
            "Oldest undelivered webhook",
            "Time since it was announced. All replicas share the webhooks and show the same.",
            "s",
            [(_most("webhooks_oldest_undelivered_seconds"), "oldest")],
        ),
        graph(
            "Undelivered webhooks",
            "Webhooks of enabled endpoints that wait in Redis, and endpoints that answered 410.",
            "none",
            [
                (_most("webhooks_undelivered"), "undelivered"),
                (_most("webhook_endpoints_disabled"), "disabled endpoints"),
            ],
        ),
        states(
            "Webhook file valid",
            "Off: the webhook file cannot be used, and the endpoints of an older one are in use.",
            [(f"headrace_gateway_webhook_file_valid{{{_JOB}}}", "{{instance}}")],
        ),
    ]


def _batches() -> list[Panel]:
    return [
        graph(
            "Lines by outcome",
            "Lines of batches a second that got their answer or error.",
            "ops",
            [(_rate("batch_lines_total", "outcome"), "{{outcome}}")],
            stacked=True,
        ),
        graph(
            "Batches",
            "Batches that each replica works on, and those of them that cannot use the directory of files.",
            "none",
            [
                (f"headrace_gateway_batches{{{_JOB}}}", "{{instance}}"),
                (f"headrace_gateway_batches_waiting_for_storage{{{_JOB}}}", "waiting: {{instance}}"),
            ],
        ),
        graph(
            "Time without an answer",
            "Longest time for which a batch of each replica has got no answer of a line.",
            "s",
            [(f"headrace_gateway_batch_idle_seconds{{{_JOB}}}", "{{instance}}")],
        ),
    ]


def _replicas() -> list[Panel]:
    return [
        states(
            "Redis reached",
            "Whether each replica reaches Redis.",
            [(f"headrace_gateway_redis_up{{{_JOB}}}", "{{instance}}")],
        ),
        states(
            "Key file valid",
            "Off: the key file cannot be used, and the keys of an older one are in use.",
            [(f"headrace_gateway_key_file_valid{{{_JOB}}}", "{{instance}}")],
        ),
        graph(
            "Replicas by version",
            "Replicas that Prometheus reaches.",
            "none",
            [(f"sum by (version) (headrace_gateway_build_info{{{_JOB}}})", "{{version}}")],
            stacked=True,
        ),
        graph(
            "Processor time",
            "Cores that each replica uses; one process uses little more than one.",
            "none",
            [(f"rate(process_cpu_seconds_total{{{_JOB}}}[$__rate_interval])", "{{instance}}")],
        ),
        graph(
            "Resident memory",
            "Memory of each replica.",
            "bytes",
            [(f"process_resident_memory_bytes{{{_JOB}}}", "{{instance}}")],
        ),
    ]


def _rate(metric: str, by: str = "", where: str = "") -> str:
    labels = f" by ({by}) " if by else ""
    return f"sum{labels}(rate(headrace_gateway_{metric}{{{_JOB}{where}}}[$__rate_interval]))"


def _most(metric: str) -> str:
    return f"max(headrace_gateway_{metric}{{{_JOB}}})"
