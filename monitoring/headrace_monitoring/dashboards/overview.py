"""Dashboard of the whole service: service level, queue, latency and outcomes."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring import buckets
from headrace_monitoring.dashboards.expressions import mean, quantile, queue_level, rate, rate_by, share_within
from headrace_monitoring.dashboards.panels import Row, build, distribution, graph, latency, number, stack

OUTCOMES = {
    "stop": "green",
    "length": "blue",
    "cancelled": "purple",
    "expired": "orange",
    "rejected": "yellow",
    "error": "red",
}


def dashboard() -> sdk.Dashboard:
    return build(
        "headrace-overview",
        "Headrace: service overview",
        "Service level, queue, latency and outcomes.",
        {"Service level": _service_level(), "Queue": _queue(), "Latency": _latency(), "Outcomes": _outcomes()},
    )


def _service_level() -> Row:
    ttft, gap, wait = (
        buckets.TIME_TO_FIRST_TOKEN_OBJECTIVE,
        buckets.INTER_TOKEN_LATENCY_OBJECTIVE,
        buckets.QUEUE_WAIT_OBJECTIVE,
    )
    share = ((None, "red"), (0.95, "orange"), (0.99, "green"))
    served = rate("requests_total", where=',outcome=~"stop|length"')
    numbers = [
        number(
            "Ready workers",
            "Workers that take messages from the queue.",
            "none",
            'sum(headrace_worker_state{@,state="ready"})',
            ((None, "red"), (1, "green")),
        ),
        number(
            f"First token in {ttft:g} s (1 h)",
            f"Share of requests whose first token was published within {ttft:g} s of their enqueue. Objective: 99%.",
            "percentunit",
            share_within("time_to_first_token_seconds", ttft, "1h"),
            share,
        ),
        number(
            f"Gaps up to {gap:g} s (1 h)",
            f"Share of tokens published within {gap:g} s of the previous token. Objective: 99%.",
            "percentunit",
            share_within("inter_token_latency_seconds", gap, "1h"),
            share,
        ),
        number(
            f"Waits up to {wait:g} s (1 h)",
            f"Share of messages that a worker took within {wait:g} s of their enqueue. Objective: 99%.",
            "percentunit",
            share_within("queue_wait_seconds", wait, "1h"),
            share,
        ),
        number("Served requests", "Requests a second that ended with stop or length.", "reqps", served),
        number("Generated tokens", "Tokens published a second.", "suffix: tokens/s", rate("generation_tokens_total")),
    ]
    return dict(numbers)


def _queue() -> Row:
    level = queue_level("queue_messages", "queue", ',state="ready"')
    ready = f"sum({level})"
    return {
        "Messages by state": graph(
            "Messages in Redis. ready: they wait for a worker. unacked: a worker leases them. dead: dead letters.",
            (queue_level("queue_messages", "queue, state"), "{{queue}} {{state}}"),
        ),
        "Ready messages by priority": stack(
            "Priority 0 is served first. Priorities 1 and 2 count as 0, 4 and 5 as 3, 7 and 8 as 6. From the exporter.",
            (f"sum by (priority) ({queue_level('queue_ready_messages', 'queue, priority')})", "priority {{priority}}"),
        ),
        "Age of the oldest ready message": graph(
            "Time for which the oldest ready message has waited. It rises steadily if no worker takes messages.",
            (queue_level("queue_oldest_message_age_seconds", "queue"), "{{queue}}"),
            unit="s",
        ),
        "Queue wait": latency("From enqueue until a worker took the message.", "queue_wait_seconds"),
        "Queue wait by priority, p95": graph(
            "Priorities 1 and 2 count as 0, 4 and 5 as 3, 7 and 8 as 6.",
            (quantile(0.95, "queue_wait_seconds", "priority"), "priority {{priority}}"),
            unit="s",
        ),
        "Messages in and out": graph(
            "received: taken from the queue. ended: the request ended. redelivered: taken again after another worker.",
            (rate("queue_received_messages_total"), "received"),
            (rate("queue_timed_messages_total", "clock"), "wait measured by the clock of {{clock}}"),
            (rate("requests_total"), "ended"),
            (rate("queue_redelivered_messages_total"), "redelivered"),
            unit="mps",
        ),
        "Outstanding tokens": graph(
            "Expected prompt and output tokens of messages that are due, by tenants' averages. From the exporter.",
            (queue_level("outstanding_tokens", "queue, state"), "{{queue}} {{state}}"),
            unit="suffix: tokens",
        ),
        "Speed of a busy worker": graph(
            "Prompt and output tokens a second with 80% of its slots used. 0: not measured yet. From the exporter.",
            ('max by (model) (headrace_worker_tokens_per_second{model=~"$model"})', "{{model}}"),
            unit="suffix: tokens/s",
        ),
        "Workers wanted": graph(
            "Workers that do the outstanding work in 60 s. By messages: the work is unknown.",
            ('headrace:workers_wanted{model=~"$model"}', "{{model}} by {{signal}}"),
            (queue_level("outstanding_worker_seconds", "queue") + " / 60", "{{queue}}"),
            unit="short",
        ),
        "Time until the earliest deadline": graph(
            "Of the waiting messages that have expires. Negative: one has expired and waits. From the exporter.",
            (queue_level("earliest_slack_seconds", "queue"), "{{queue}}"),
            unit="s",
        ),
        "Time to drain the queue": graph(
            "Ready messages divided by the rate at which requests ended in the last 5 minutes.",
            (f"{ready} / sum(rate(headrace_requests_total{{@}}[5m]))", "drain time"),
            unit="s",
        ),
    }


def _latency() -> Row:
    ttft = "time_to_first_token_seconds"
    return {
        "Time to first token": latency("From enqueue until the first token was published.", ttft),
        "Inter-token latency": latency("Between two tokens of a request as published.", "inter_token_latency_seconds"),
        "Time per output token": latency(
            "Mean time between two tokens of a request.",
            "request_time_per_output_token_seconds",
        ),
        "Request duration": latency(
            "From enqueue until the stream ended, for requests that ended with stop or length.",
            "request_duration_seconds",
        ),
        "Time to first token, distribution": distribution("Requests by time to first token.", "s", ttft),
        "Where the time goes, means": stack(
            "The stages of a request in their order: queue, engine's queue, prefill, decode.",
            (mean("queue_wait_seconds"), "queue"),
            (mean("engine_queue_seconds"), "engine's queue"),
            (mean("engine_prefill_seconds"), "prefill"),
            (mean("engine_decode_seconds"), "decode"),
            unit="s",
        ),
    }


def _outcomes() -> Row:
    return {
        "Requests by outcome": stack(
            "rejected: the request was invalid. error: the service failed.",
            rate_by("requests_total", "outcome"),
            unit="reqps",
            colours=OUTCOMES,
        ),
        "Prompt length": distribution("Requests by prompt tokens.", "none", "request_prompt_tokens"),
        "Generated length": distribution("Requests by generated tokens.", "none", "request_generation_tokens"),
        "Dead letters (1 h)": graph(
            "Messages moved to the dead letters, by reason. Inspect each of them.",
            ("sum by (reason) (increase(headrace_queue_dead_lettered_messages_total{@}[1h]))", "{{reason}}"),
        ),
        "Dead letters kept": graph(
            "Dead letters in Redis now, by reason. From the exporter.",
            (queue_level("queue_dead_letters", "queue, reason"), "{{queue}} {{reason}}"),
        ),
    }
