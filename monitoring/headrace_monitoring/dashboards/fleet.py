"""Dashboard of the fleet: workers, deliveries, Redis and processes."""

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
    """Return an expression for the number of a worker's current state."""
    by_state = {name: f'sum by (instance) (headrace_worker_state{{@,state="{name}"}})' for name, _ in WORKER_STATES[1:]}
    return " + ".join(f"{number} * {state}" for number, state in enumerate(by_state.values(), start=1))


def _workers() -> Row:
    return {
        "Worker state": states(
            "loading: the worker loads its model. ready: it takes messages. draining: it finishes its requests.",
            (_worker_state(), "{{instance}}"),
            names=WORKER_STATES,
        ),
        "Loaded weights": graph(
            "Share of the model's weights that each worker has loaded. A worker reports it every two seconds.",
            ("headrace_engine_load_ratio{@}", "{{instance}}"),
            unit="percentunit",
        ),
        "Engine and Redis": states(
            "Whether the engine process of each worker runs, and whether workers and exporter reach Redis.",
            ("headrace_engine_up{@}", "{{instance}} engine"),
            ("headrace_redis_up{@}", "{{instance}} Redis"),
            ("headrace_exporter_redis_up", "{{instance}} {{server}}"),
        ),
        "Slots": stack(
            "Request slots of all workers. Without a free slot, messages wait in Redis.",
            ("sum by (state) (headrace_worker_slots{@})", "{{state}}"),
        ),
        "Engine restarts (1 h)": graph(
            "Engine processes replaced, by reason.", increase_by("engine_restarts_total", "reason")
        ),
        "Time since the last heartbeat": graph(
            "The worker's event loop sets the heartbeat. If the time grows, the worker is blocked.",
            ("time() - headrace_worker_heartbeat_timestamp_seconds{@}", "{{instance}}"),
            unit="s",
        ),
        "Event loop lag, p99": graph(
            "Longest time in each second for which a worker's event loop was blocked. Long lags lose leases.",
            (quantile(0.99, "event_loop_lag_seconds", "instance"), "{{instance}}"),
            unit="s",
        ),
    }


def _deliveries() -> Row:
    return {
        "Leases lost (1 h)": graph(
            "Leases that expired and whose messages another worker took.",
            increase_by("leases_lost_total", "instance"),
        ),
        "Messages returned (1 h)": graph(
            "By reason. not_ready, redis, drain, cleared, preempted and no_room do not count as a delivery.",
            increase_by("queue_returned_messages_total", "reason"),
        ),
        "Streams replaced (1 h)": graph(
            "Streams that no worker can have written: no entry can follow their last id. Workers create them again.",
            increase_by("streams_replaced_total", "instance"),
        ),
        "Streams deleted (1 h)": graph(
            "Streams that disappeared from Redis while their request ran. Such a request ends as expired.",
            increase_by("streams_gone_total", "instance"),
        ),
        "Resumed across draws (1 h)": graph(
            "Sampled requests that an engine with other random numbers continued. Their further tokens differ.",
            increase_by("resumed_across_draws_total", "instance"),
        ),
        "Expired leases": graph(
            "Messages with expired leases. Any worker requeues them within seconds. From the exporter.",
            (queue_level("queue_run_out_leases", "queue"), "{{queue}}"),
        ),
        "Messages in lists that no worker reads": graph(
            "Wrong sep, global_keyprefix or server of producers: see `headrace queue list`. From the exporter.",
            (queue_level("queue_unread_messages", "queue"), "{{queue}}"),
        ),
        "Queue served": states(
            "Whether Redis gives the queue's messages to workers. Off: it refuses, or a key has the wrong type.",
            ("1 - " + queue_level("queue_blocked", "queue"), "{{queue}}"),
        ),
        "Time since a worker served the model": graph(
            "Workers report it every minute. From the exporter.",
            ('time() - max by (model) (headrace_model_last_seen_timestamp_seconds{model=~"$model"})', "{{model}}"),
            unit="s",
        ),
        "Stream entries": graph(
            "Stream entries a second that workers wrote to Redis.",
            rate_by("stream_entries_total", "instance"),
            unit="suffix: entries/s",
        ),
    }


def _redis() -> Row:
    return {
        "Redis memory": graph(
            "Used memory, and maxmemory (0: no limit). From the exporter.",
            ("headrace_redis_memory_used_bytes", "{{server}} used"),
            ("headrace_redis_memory_limit_bytes", "{{server}} limit"),
            unit="bytes",
        ),
        "Redis round trip, p99": graph(
            "By command, measured by the workers.",
            (quantile(0.99, "redis_command_seconds", "command"), "{{command}}"),
            unit="s",
        ),
        "Redis errors": graph(
            "Commands a second that failed, by command.", rate_by("redis_errors_total", "command"), unit="ops"
        ),
        "Redis connections": graph(
            "Open connections, and connections refused in the last hour. From the exporter.",
            ("headrace_redis_connected_clients", "{{server}} connected"),
            ("increase(headrace_redis_rejected_connections_total[1h])", "{{server}} refused (1 h)"),
        ),
        "Keys evicted by Redis (1 h)": graph(
            "Each is a lost message, stream or result. The eviction policy must be noeviction. From the exporter.",
            ("increase(headrace_redis_evicted_keys_total[1h])", "{{server}} evicted"),
            ("headrace_redis_may_evict", "{{server}} allowed by the policy (1) or not (0)"),
        ),
        "Stream servers": graph(
            "Whether the exporter reaches each server, whether it gets no new streams, and how many it has."
            " Empty without HEADRACE_STREAM_URLS.",
            ("headrace_stream_server_up", "{{stream_server}} reached (1) or away (0)"),
            ("headrace_stream_server_draining", "{{stream_server}} draining"),
            ("headrace_stream_server_streams", "{{stream_server}} streams"),
        ),
        "Redis persistence": states(
            "Whether the last write of the append-only file and the last snapshot succeeded. From the exporter.",
            ("headrace_redis_persistence_ok", "{{server}} persistence"),
            ("headrace_redis_loads_all", "{{server}} a restart loads the whole file"),
        ),
        "Redis restarts": graph(
            "Messages before and after the last restart, and commands of the append-only file that Redis refused."
            " From the exporter.",
            ("headrace_redis_messages_before_restart", "{{server}} ready before"),
            ("headrace_redis_messages_after_restart", "{{server}} ready or leased after"),
            ("headrace_redis_load_errors", "{{server}} refused"),
            ("time() - headrace_redis_start_timestamp_seconds < bool 3600", "{{server}} started in the last hour"),
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
            "Two versions at once mean that a rollout is in progress.",
            ("sum by (version) (headrace_build_info{@})", "workers {{version}}"),
            ("sum by (version) (headrace_exporter_build_info)", "exporters {{version}}"),
        ),
        "Polls of the exporter": graph(
            "Duration and age of the last poll of Redis.",
            ("headrace_exporter_poll_seconds", "duration"),
            ("time() - headrace_exporter_poll_timestamp_seconds", "age"),
            unit="s",
        ),
        "Failed polls of the exporter (1 h)": graph(
            "Polls that Redis did not answer, and registered models above the limit of 100.",
            ("increase(headrace_exporter_poll_failures_total[1h])", "failures"),
            ("headrace_exporter_models_left_out", "models left out"),
        ),
    }
