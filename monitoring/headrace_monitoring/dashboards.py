"""The Grafana dashboard as code: `python -m headrace_monitoring.dashboards` writes it as JSON.

The only module that needs grafana-foundation-sdk, which is a development dependency. The JSON is committed, so that
Grafana can be provisioned from a checkout; a test holds it against this file.

Every worker of a queue reads the same levels from Redis, so queue levels are joined with `max`, never with `sum`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from headrace_monitoring import buckets

DASHBOARDS = Path(__file__).resolve().parent.parent / "grafana" / "dashboards"

DATA_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# "@" in an expression below stands for the selection made at the top of the dashboard
SELECTION = 'job=~"$job",model=~"$model",instance=~"$instance"'
PROCESS_SELECTION = 'job=~"$job",instance=~"$instance"'  # process_* metrics know no model

COLUMNS = 24
Query = tuple[str, str]  # expression, legend
Panel = timeseries.Panel | stat.Panel | heatmap.Panel | statetimeline.Panel


# Expressions


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Events a second, summed over workers."""
    return f"sum{_by(by)}(rate(headrace_{metric}{{@{where}}}[$__rate_interval]))"


def mean(histogram: str) -> str:
    return f"{rate(f'{histogram}_sum')} / {rate(f'{histogram}_count')}"


def quantile(q: float, histogram: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels)})"


def share_within(histogram: str, objective: float, window: str) -> str:
    """The exact share of observations up to an objective; works because the objective is a bucket's bound."""
    within = f'sum(rate(headrace_{histogram}_bucket{{@,le="{objective}"}}[{window}]))'
    return f"{within} / sum(rate(headrace_{histogram}_count{{@}}[{window}]))"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


def quantiles(histogram: str) -> list[Query]:
    return [*((quantile(q, histogram), f"p{round(q * 100)}") for q in (0.5, 0.95, 0.99)), (mean(histogram), "mean")]


# Panels


def target(expression: str, legend: str, selection: str = SELECTION) -> prometheus.Dataquery:
    query = prometheus.Dataquery().datasource(DATA_SOURCE).range()
    return query.expr(expression.replace("@", selection)).legend_format(legend)


def graph(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    stacked: bool = False,
    selection: str = SELECTION,
) -> Panel:
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATA_SOURCE)
        .min(0)
        .fill_opacity(30 if stacked else 5)
        .span(COLUMNS // 3)
        .height(8)
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for expression, legend in queries:
        panel.with_target(target(expression, legend, selection))
    return panel


def number(
    title: str, description: str, unit: str, expression: str, thresholds: Sequence[tuple[float | None, str]] = ()
) -> Panel:
    """One number; `thresholds` are (from value, colour), the first with None."""
    steps = [Threshold(value, colour) for value, colour in thresholds or ((None, "blue"),)]
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(DATA_SOURCE)
        .thresholds(dashboard.ThresholdsConfig().steps(steps))
        .span(COLUMNS // 6)
        .height(4)
        .with_target(target(expression, title))
    )


def distribution(title: str, description: str, unit: str, histogram: str) -> Panel:
    increase = f"sum by (le) (increase(headrace_{histogram}_bucket{{@}}[$__rate_interval]))"
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .datasource(DATA_SOURCE)
        .span(COLUMNS // 3)
        .height(8)
        .with_target(target(increase, "{{le}}").format(PromQueryFormat.HEATMAP))
    )


def states(title: str, description: str, queries: Sequence[Query]) -> Panel:
    panel = (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .unit("bool_on_off")
        .datasource(DATA_SOURCE)
        .span(COLUMNS // 3)
        .height(8)
    )
    for expression, legend in queries:
        panel.with_target(target(expression, legend))
    return panel


# Rows


def service_level() -> list[Panel]:
    ttft, gap, wait = (
        buckets.TIME_TO_FIRST_TOKEN_OBJECTIVE,
        buckets.INTER_TOKEN_LATENCY_OBJECTIVE,
        buckets.QUEUE_WAIT_OBJECTIVE,
    )
    share = ((None, "red"), (0.95, "orange"), (0.99, "green"))
    served = rate("requests_total", where=',outcome=~"stop|length"')
    return [
        number(
            "Ready workers",
            "Workers that take messages from the queue.",
            "none",
            'sum(headrace_worker_state{@,state="ready"})',
            ((None, "red"), (1, "green")),
        ),
        number(
            f"First token within {ttft:g} s (1 h)",
            "Share of requests whose first token was published in time, counted from enqueue. Objective: 99%.",
            "percentunit",
            share_within("time_to_first_token_seconds", ttft, "1h"),
            share,
        ),
        number(
            f"Gaps within {gap:g} s (1 h)",
            "Share of tokens that followed the one before in time. Objective: 99%.",
            "percentunit",
            share_within("inter_token_latency_seconds", gap, "1h"),
            share,
        ),
        number(
            f"Waits within {wait:g} s (1 h)",
            "Share of messages that a worker took from the queue in time. Objective: 99%.",
            "percentunit",
            share_within("queue_wait_seconds", wait, "1h"),
            share,
        ),
        number("Served requests", "Requests a second that ended with stop or length.", "reqps", served),
        number("Generated tokens", "Tokens published a second.", "suffix: tokens/s", rate("generation_tokens_total")),
    ]


def queue() -> list[Panel]:
    ready = 'sum(max by (queue) (headrace_queue_messages{@,state="ready"}))'
    return [
        graph(
            "Messages by state",
            "Levels in Redis: ready to be taken, leased by a worker (unacked), dead letters.",
            "none",
            [("max by (queue, state) (headrace_queue_messages{@})", "{{queue}} {{state}}")],
        ),
        graph(
            "Age of the oldest ready message",
            "How long the message next in line has waited. Rises steadily when nobody takes messages.",
            "s",
            [("max by (queue) (headrace_queue_oldest_message_age_seconds{@})", "{{queue}}")],
        ),
        graph("Queue wait", "From enqueue until a worker took the message.", "s", quantiles("queue_wait_seconds")),
        graph(
            "Queue wait by priority, p95",
            "Priority 0 goes first. Priorities between two steps share the lower step's list.",
            "s",
            [(quantile(0.95, "queue_wait_seconds", "priority"), "priority {{priority}}")],
        ),
        graph(
            "Messages in and out",
            "Taken from the queue, ended, and taken again after another worker had not finished.",
            "mps",
            [
                (rate("queue_received_messages_total"), "received"),
                (rate("requests_total"), "ended"),
                (rate("queue_redelivered_messages_total"), "redelivered"),
            ],
        ),
        graph(
            "Time to drain the queue",
            "Ready messages divided by the rate at which requests ended in the last 5 minutes.",
            "s",
            [(f"{ready} / sum(rate(headrace_requests_total{{@}}[5m]))", "drain time")],
        ),
    ]


def latency() -> list[Panel]:
    ttft = "time_to_first_token_seconds"
    return [
        graph("Time to first token", "From enqueue until the first token was published.", "s", quantiles(ttft)),
        graph(
            "Inter-token latency",
            "Between two tokens of a request as published.",
            "s",
            quantiles("inter_token_latency_seconds"),
        ),
        graph(
            "Request duration",
            "From enqueue until the stream ended, for requests that ended with stop or length.",
            "s",
            quantiles("request_duration_seconds"),
        ),
        distribution("Time to first token, distribution", "Requests by time to first token.", "s", ttft),
        graph(
            "Engine time to first token",
            "From the start in the engine until the first token: the waiting for a batch and the prefill.",
            "s",
            quantiles(f"engine_{ttft}"),
        ),
        graph(
            "Where the time goes, means",
            "Queue, then engine until the first token, then generation. The rest of a request's duration is transport.",
            "s",
            [
                (mean("queue_wait_seconds"), "queue"),
                (mean(f"engine_{ttft}"), "until the first token"),
                (f"({mean('request_duration_seconds')}) - ({mean(ttft)})", "generation"),
            ],
            stacked=True,
        ),
    ]


def engine() -> list[Panel]:
    hit, queried = rate("prefix_cache_hit_tokens_total"), rate("prefix_cache_queried_tokens_total")
    return [
        graph(
            "Requests in the engine",
            "Running in the batch, waiting for KV blocks or a place; and what workers hold in flight.",
            "none",
            [
                ("sum by (state) (headrace_engine_requests{@})", "{{state}}"),
                ("sum(headrace_requests_in_flight{@})", "in flight"),
            ],
        ),
        graph(
            "Slots",
            "Request slots of all workers. No free slot means that the backlog waits in Redis.",
            "none",
            [("sum by (state) (headrace_worker_slots{@})", "{{state}}")],
            stacked=True,
        ),
        graph(
            "Tokens by source",
            "Prompt tokens computed or found in the prefix cache, and tokens generated.",
            "suffix: tokens/s",
            [
                (rate("prompt_tokens_total", "source"), "prompt {{source}}"),
                (rate("generation_tokens_total"), "generated"),
            ],
        ),
        graph("Tokens a step", "The size of a batch in tokens.", "none", quantiles("engine_step_tokens")),
        graph("Requests a step", "The size of a batch in requests.", "none", quantiles("engine_step_requests")),
        graph(
            "Step time by kind, p95",
            "Steps that only prefill, only decode, or do both.",
            "s",
            [(quantile(0.95, "engine_step_seconds", "kind"), "{{kind}}")],
        ),
        graph(
            "Loop phases",
            "Share of wall time that the step loop of a worker spends in each phase; what is missing to 100% is idle.",
            "percentunit",
            [("avg by (phase) (rate(headrace_engine_phase_seconds_total{@}[$__rate_interval]))", "{{phase}}")],
            stacked=True,
        ),
        graph(
            "Time since the last step",
            "Grows while idle, which is harmless. With requests in flight it means a stalled engine.",
            "s",
            [("time() - headrace_engine_last_step_timestamp_seconds{@}", "{{instance}}")],
        ),
        graph(
            "Preemptions",
            "Requests a second that gave up their KV blocks to another one. More than a few mean too little KV memory.",
            "ops",
            [(rate("engine_preemptions_total"), "preemptions")],
        ),
        graph(
            "KV cache use",
            "Share of the KV blocks that requests hold, by worker.",
            "percentunit",
            [("headrace_kv_cache_usage_ratio{@}", "{{instance}}")],
        ),
        graph(
            "KV blocks",
            "Held by requests, kept for the prefix cache, and free.",
            "none",
            [("sum by (state) (headrace_kv_cache_blocks{@})", "{{state}}")],
            stacked=True,
        ),
        graph(
            "Prefix cache hit rate",
            "Share of the prompt tokens looked up that were found.",
            "percentunit",
            [(f"{hit} / {queried}", "hit rate")],
        ),
        graph(
            "Draft acceptance",
            "Speculative decoding: share of the guessed tokens that the model drew itself, in all and by place in the "
            "draft. Where it is low, shorter drafts cost less.",
            "percentunit",
            [
                (f"{rate('draft_accepted_tokens_total')} / {rate('draft_tokens_total')}", "all"),
                (
                    f"{rate('draft_accepted_tokens_total', 'position')} / {rate('draft_tokens_total', 'position')}",
                    "place {{position}}",
                ),
            ],
        ),
    ]


def outcomes() -> list[Panel]:
    return [
        graph(
            "Requests by outcome",
            "How streams ended. Rejected requests were refused as invalid; errors are ours.",
            "reqps",
            [(rate("requests_total", "outcome"), "{{outcome}}")],
            stacked=True,
        ),
        distribution("Prompt length", "Requests by prompt tokens.", "none", "request_prompt_tokens"),
        distribution("Generated length", "Requests by generated tokens.", "none", "request_generation_tokens"),
        graph(
            "Dead letters (1 h)",
            "Messages given up, by reason. Each needs a look.",
            "none",
            [("sum by (reason) (increase(headrace_queue_dead_lettered_messages_total{@}[1h]))", "{{reason}}")],
        ),
        graph(
            "Engine restarts (1 h)",
            "Engine processes replaced, by reason.",
            "none",
            [("sum by (reason) (increase(headrace_engine_restarts_total{@}[1h]))", "{{reason}}")],
        ),
        graph(
            "Leases lost (1 h)",
            "Messages that another worker took because this one was silent for longer than its lease.",
            "none",
            [("sum by (instance) (increase(headrace_leases_lost_total{@}[1h]))", "{{instance}}")],
        ),
        graph(
            "Redis errors",
            "Commands a second that failed, by command.",
            "ops",
            [(rate("redis_errors_total", "command"), "{{command}}")],
        ),
    ]


def runtime() -> list[Panel]:
    return [
        states(
            "Worker state",
            "The state that each worker is in.",
            [("headrace_worker_state{@}", "{{instance}} {{state}}")],
        ),
        states(
            "Engine and Redis",
            "Whether each worker's engine process runs, and whether it reaches Redis.",
            [("headrace_engine_up{@}", "{{instance}} engine"), ("headrace_redis_up{@}", "{{instance}} Redis")],
        ),
        graph(
            "Time since the last heartbeat",
            "The loop that does the work ticks it; a growing age is a stuck worker.",
            "s",
            [("time() - headrace_worker_heartbeat_timestamp_seconds{@}", "{{instance}}")],
        ),
        graph(
            "Redis round trip, p99",
            "By command, seen from the workers.",
            "s",
            [(quantile(0.99, "redis_command_seconds", "command"), "{{command}}")],
        ),
        graph(
            "CPU",
            "CPU time of the worker process, without the engine process; 100% is one core.",
            "percentunit",
            [("rate(process_cpu_seconds_total{@}[$__rate_interval])", "{{instance}}")],
            selection=PROCESS_SELECTION,
        ),
        graph(
            "Memory",
            "Resident memory of the worker process, without the engine process.",
            "bytes",
            [("process_resident_memory_bytes{@}", "{{instance}}")],
            selection=PROCESS_SELECTION,
        ),
        graph(
            "Workers by version",
            "Two versions at once are a rollout under way.",
            "none",
            [("sum by (version) (headrace_build_info{@})", "{{version}}")],
            stacked=True,
        ),
    ]


def overview() -> dashboard.Dashboard:
    """The dashboard "Headrace: service overview"."""
    built = (
        dashboard.Dashboard("Headrace: service overview")
        .uid("headrace-overview")
        .description("Queue, latency, engine and workers of a Headrace service.")
        .tags(["headrace", "llm"])
        .readonly()
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("job", "Job", "headrace_build_info"))
        .with_variable(_variable("model", "Model", 'headrace_build_info{job=~"$job"}'))
        .with_variable(_variable("instance", "Instance", 'headrace_build_info{job=~"$job",model=~"$model"}'))
    )
    rows = {
        "Service level": service_level(),
        "Queue": queue(),
        "Latency": latency(),
        "Engine": engine(),
        "Outcomes": outcomes(),
        "Runtime": runtime(),
    }
    ids = itertools.count(1)  # links to a panel name its id
    for title, panels in rows.items():
        built.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels:
            built.with_panel(panel.id(next(ids)))
    return built


def _variable(name: str, label: str, series: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATA_SOURCE)
        .query(f"label_values({series}, {name})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def render(built: dashboard.Dashboard) -> str:
    """The JSON that Grafana reads, the same for the same code."""
    return json.dumps(built.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main(folder: Path = DASHBOARDS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "overview.json").write_text(render(overview()), encoding="utf-8")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
