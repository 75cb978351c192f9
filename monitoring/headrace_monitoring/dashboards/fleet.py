"""Fleet: the processes of the service and the Redis between them."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring.dashboards.expressions import increase_by, quantile, queue_level, rate_by
from headrace_monitoring.dashboards.panels import Row, build, graph, stack, states

WORKER_STATES = (("none", "text"), ("loading", "orange"), ("ready", "green"), ("draining", "blue"))


def dashboard() -> sdk.Dashboard:
    return build(
        "headrace-fleet",
        "Headrace: fleet",
        "Workers, leases, restarts, Redis, exporter.",
        {"Workers": _workers(), "Deliveries": _deliveries(), "Redis": _redis(), "Processes": _processes()},
    )


def _worker_state() -> str:
    """The number of the one state that a worker is in."""
    by_state = {name: f'sum by (instance) (headrace_worker_state{{@,state="{name}"}})' for name, _ in WORKER_STATES[1:]}
    return " + ".join(f"{number} * {state}" for number, state in enumerate(by_state.values(), start=1))


def _workers() -> Row:
    return {
        "Worker state": states(
            "What each worker does: it loads its model, takes messages (ready), or lets what runs end (draining).",
            (_worker_state(), "{{instance}}"),
            names=WORKER_STATES,
        ),
        "Engine and Redis": states(
            "Whether each worker's engine process runs, and whether it and the exporter reach Redis.",
            ("headrace_engine_up{@}", "{{instance}} engine"),
            ("headrace_redis_up{@}", "{{instance}} Redis"),
            ("headrace_exporter_redis_up", "{{instance}} Redis"),
        ),
        "Slots": stack(
            "Request slots of all workers. No free slot means that the backlog waits in Redis.",
            ("sum by (state) (headrace_worker_slots{@})", "{{state}}"),
        ),
        "Engine restarts (1 h)": graph(
            "Engine processes replaced, by reason.", increase_by("engine_restarts_total", "reason")
        ),
        "Time since the last heartbeat": graph(
            "The loop that does the work ticks it; a growing age is a stuck worker.",
            ("time() - headrace_worker_heartbeat_timestamp_seconds{@}", "{{instance}}"),
            unit="s",
        ),
        "Event loop lag, p99": graph(
            "Longest time in each second that a worker's loop spent on one thing. Long lags lose leases.",
            (quantile(0.99, "event_loop_lag_seconds", "instance"), "{{instance}}"),
            unit="s",
        ),
    }


def _deliveries() -> Row:
    return {
        "Leases lost (1 h)": graph(
            "Messages that another worker took because this one was silent for longer than its lease.",
            increase_by("leases_lost_total", "instance"),
        ),
        "Messages given back (1 h)": graph(
            "By reason: not_ready, redis, drain and cleared are the fleet's own doing, the others count as a delivery.",
            increase_by("queue_returned_messages_total", "reason"),
        ),
        "Streams replaced (1 h)": graph(
            "Streams with ids behind which nothing can come; no worker writes these.",
            increase_by("streams_replaced_total", "instance"),
        ),
        "Streams deleted (1 h)": graph(
            "Streams that somebody deleted, or Redis lost, under a running request; it ends as expired.",
            increase_by("streams_gone_total", "instance"),
        ),
        "Resumed across draws (1 h)": graph(
            "Sampled requests continued by an engine that draws otherwise: their tokens are as random, but others.",
            increase_by("resumed_across_draws_total", "instance"),
        ),
        "Leases that ran out": graph(
            "Messages whose lease has expired, not yet put back; any worker does it within seconds. From the exporter.",
            (queue_level("queue_run_out_leases", "queue"), "{{queue}}"),
        ),
        "Queue served": states(
            "Whether Redis gives workers the queue's messages. Off: it refuses, or a key has another type.",
            ("1 - " + queue_level("queue_blocked", "queue"), "{{queue}}"),
        ),
        "Time since a worker served the model": graph(
            "Workers say so every minute. From the exporter.",
            ('time() - max by (model) (headrace_model_last_seen_timestamp_seconds{model=~"$model"})', "{{model}}"),
            unit="s",
        ),
        "Stream entries": graph(
            "Entries a second that Redis took from workers.",
            rate_by("stream_entries_total", "instance"),
            unit="suffix: entries/s",
        ),
    }


def _redis() -> Row:
    return {
        "Redis memory": graph(
            "Used, and the most that Redis may use (0: no limit). From the exporter.",
            ("headrace_redis_memory_used_bytes", "used"),
            ("headrace_redis_memory_limit_bytes", "limit"),
            unit="bytes",
        ),
        "Redis round trip, p99": graph(
            "By command, seen from the workers.",
            (quantile(0.99, "redis_command_seconds", "command"), "{{command}}"),
            unit="s",
        ),
        "Redis errors": graph(
            "Commands a second that failed, by command.", rate_by("redis_errors_total", "command"), unit="ops"
        ),
        "Redis connections": graph(
            "Open connections, and those refused within the hour. From the exporter.",
            ("headrace_redis_connected_clients", "connected"),
            ("increase(headrace_redis_rejected_connections_total[1h])", "refused (1 h)"),
        ),
        "Keys dropped by Redis (1 h)": graph(
            "Each is a message, a stream or a result lost: the eviction policy must be noeviction. From the exporter.",
            ("increase(headrace_redis_evicted_keys_total[1h])", "dropped"),
            ("headrace_redis_may_evict", "allowed by the policy (1) or not (0)"),
        ),
        "Redis persistence": states(
            "Whether the last write of the append-only file and the last snapshot went well. From the exporter.",
            ("headrace_redis_persistence_ok", "persistence"),
        ),
    }


def _processes() -> Row:
    return {
        "CPU": graph(
            "CPU time of the worker process, without the engine process; 100% is one core.",
            ("rate(process_cpu_seconds_total{@process}[$__rate_interval])", "{{instance}}"),
            unit="percentunit",
        ),
        "Memory": graph(
            "Resident memory of the worker process, without the engine process.",
            ("process_resident_memory_bytes{@process}", "{{instance}}"),
            unit="bytes",
        ),
        "Processes by version": stack(
            "Two versions at once are a rollout under way.",
            ("sum by (version) (headrace_build_info{@})", "workers {{version}}"),
            ("sum by (version) (headrace_exporter_build_info)", "exporters {{version}}"),
        ),
        "Exporter's looks at Redis": graph(
            "How long the last one took, and how long ago it was.",
            ("headrace_exporter_poll_seconds", "duration"),
            ("time() - headrace_exporter_poll_timestamp_seconds", "age"),
            unit="s",
        ),
        "Exporter's failures (1 h)": graph(
            "Looks at Redis that it did not answer, and registered models beyond the 100 that are shown.",
            ("increase(headrace_exporter_poll_failures_total[1h])", "failures"),
            ("headrace_exporter_models_left_out", "models left out"),
        ),
    }
