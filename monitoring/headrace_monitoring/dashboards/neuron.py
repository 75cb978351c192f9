"""Dashboard of Neuron devices: AWS's metrics, which `neuron-monitor-prometheus.py` exposes.

These metrics have no labels for model and worker, so the variables of the dashboard do not filter them.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring.dashboards.expressions import Query
from headrace_monitoring.dashboards.panels import Row, build, graph, stack

_MEMORY = ("tensors", "constants", "model_code", "model_shared_scratchpad", "runtime_memory")
_ECC = "hardware_ecc_events_total|neurondevice_hw_ecc_events_total"
"""The old and the new name of one metric."""


def dashboard() -> sdk.Dashboard:
    return build(
        "headrace-neuron",
        "Headrace: neuron",
        "AWS Neuron devices, from neuron-monitor. Empty without such devices.",
        {"Cores": _cores(), "Executions": _executions()},
    )


def _cores() -> Row:
    return {
        "NeuronCore utilisation": graph(
            "Share of time for which each core computes.",
            ("avg by (instance, neuroncore) (neuroncore_utilization_ratio{@neuron})", "{{instance}} {{neuroncore}}"),
            unit="percentunit",
        ),
        "Device memory by use": stack(
            "Sum over all cores. tensors: weights and KV cache. model code and scratchpad: compiled graphs.",
            *[(f"sum(neuroncore_memory_usage_{use}{{@neuron}})", use.replace("_", " ")) for use in _MEMORY],
            unit="bytes",
        ),
        "Memory of the Neuron runtime": graph(
            "Memory on the host and on the devices.",
            ("sum by (memory_location) (neuron_runtime_memory_used_bytes{@neuron})", "{{memory_location}}"),
            unit="bytes",
        ),
    }


def _executions() -> Row:
    return {
        "Execution latency": graph(
            "Execution time of one graph, by percentile.",
            ("max by (percentile) (execution_latency_seconds{@neuron})", "{{percentile}}"),
            unit="s",
        ),
        "Executions": graph(
            "Executions of graphs a second, by status. timed_out and failed_to_queue should be 0.",
            _rate_by("execution_status_total", "status_type"),
            unit="ops",
        ),
        "Errors of executions": graph(
            "Errors a second by type. hardware and runtime mean a failing device.",
            _rate_by("execution_errors_total", "error_type"),
            unit="ops",
        ),
        "Memory errors of the hardware": graph(
            "ECC events a second by type. Uncorrected events mean a failing device.",
            (f'sum by (event_type) (rate({{__name__=~"{_ECC}",@neuron}}[$__rate_interval]))', "{{event_type}}"),
            unit="ops",
        ),
    }


def _rate_by(metric: str, by: str) -> Query:
    return f"sum by ({by}) (rate({metric}{{@neuron}}[$__rate_interval]))", f"{{{{{by}}}}}"
