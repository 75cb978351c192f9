"""Neuron: AWS's own counters of the devices, which `neuron-monitor-prometheus.py` exposes beside the worker.

The names are AWS's. They know neither model nor worker, so the selection of both does not reach them.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring.dashboards.expressions import Query
from headrace_monitoring.dashboards.panels import Row, build, graph, stack

_MEMORY = ("tensors", "constants", "model_code", "model_shared_scratchpad", "runtime_memory")
_ECC = "hardware_ecc_events_total|neurondevice_hw_ecc_events_total"
"""The older and the newer name."""


def dashboard() -> sdk.Dashboard:
    return build(
        "headrace-neuron",
        "Headrace: neuron",
        "AWS Neuron devices, as neuron-monitor sees them. Empty where there are none.",
        {"Cores": _cores(), "Executions": _executions()},
    )


def _cores() -> Row:
    return {
        "NeuronCore utilisation": graph(
            "Share of the time that each core computes.",
            ("avg by (instance, neuroncore) (neuroncore_utilization_ratio{@neuron})", "{{instance}} {{neuroncore}}"),
            unit="percentunit",
        ),
        "Device memory by use": stack(
            "Of all cores: weights and K/V memory are tensors, compiled graphs are model code and scratchpad.",
            *[(f"sum(neuroncore_memory_usage_{use}{{@neuron}})", use.replace("_", " ")) for use in _MEMORY],
            unit="bytes",
        ),
        "Memory of the Neuron runtime": graph(
            "On the host and on the devices.",
            ("sum by (memory_location) (neuron_runtime_memory_used_bytes{@neuron})", "{{memory_location}}"),
            unit="bytes",
        ),
    }


def _executions() -> Row:
    return {
        "Execution latency": graph(
            "Time of one graph on the device, by percentile.",
            ("max by (percentile) (execution_latency_seconds{@neuron})", "{{percentile}}"),
            unit="s",
        ),
        "Executions": graph(
            "Graphs a second by how they ended; timed_out and failed_to_queue should be 0.",
            _rate_by("execution_status_total", "status_type"),
            unit="ops",
        ),
        "Errors of executions": graph(
            "Errors a second by type; hardware and runtime speak of a device that fails.",
            _rate_by("execution_errors_total", "error_type"),
            unit="ops",
        ),
        "Memory errors of the hardware": graph(
            "ECC events a second by type; uncorrected ones speak of a device that fails.",
            (f'sum by (event_type) (rate({{__name__=~"{_ECC}",@neuron}}[$__rate_interval]))', "{{event_type}}"),
            unit="ops",
        ),
    }


def _rate_by(metric: str, by: str) -> Query:
    return f"sum by ({by}) (rate({metric}{{@neuron}}[$__rate_interval]))", f"{{{{{by}}}}}"
