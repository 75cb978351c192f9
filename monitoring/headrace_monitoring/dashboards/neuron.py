"""Neuron: AWS's own counters of the devices, which `neuron-monitor-prometheus.py` exposes beside the worker.

The names are AWS's. They know neither model nor worker, so the selection of both does not reach them.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as sdk

from headrace_monitoring.dashboards.expressions import Query
from headrace_monitoring.dashboards.panels import Panel, build, graph

JOB = "neuron-monitor"
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


def _cores() -> list[Panel]:
    return [
        graph(
            "NeuronCore utilisation",
            "Share of the time that each core computes.",
            "percentunit",
            [
                (
                    f"avg by (instance, neuroncore) ({_level('neuroncore_utilization_ratio')})",
                    "{{instance}} {{neuroncore}}",
                )
            ],
        ),
        graph(
            "Device memory by use",
            "Of all cores: weights and K/V memory are tensors, compiled graphs are model code and scratchpad.",
            "bytes",
            [(f"sum({_level(f'neuroncore_memory_usage_{use}')})", use.replace("_", " ")) for use in _MEMORY],
            stacked=True,
        ),
        graph(
            "Memory of the Neuron runtime",
            "On the host and on the devices.",
            "bytes",
            [(f"sum by (memory_location) ({_level('neuron_runtime_memory_used_bytes')})", "{{memory_location}}")],
        ),
    ]


def _executions() -> list[Panel]:
    return [
        graph(
            "Execution latency",
            "Time of one graph on the device, by percentile.",
            "s",
            [(f"max by (percentile) ({_level('execution_latency_seconds')})", "{{percentile}}")],
        ),
        graph(
            "Executions",
            "Graphs a second by how they ended; timed_out and failed_to_queue should be 0.",
            "ops",
            [_rate("execution_status_total", "status_type")],
        ),
        graph(
            "Errors of executions",
            "Errors a second by type; hardware and runtime speak of a device that fails.",
            "ops",
            [_rate("execution_errors_total", "error_type")],
        ),
        graph(
            "Memory errors of the hardware",
            "ECC events a second by type; uncorrected ones speak of a device that fails.",
            "ops",
            [
                (
                    f'sum by (event_type) (rate({{__name__=~"{_ECC}",job="{JOB}"}}[$__rate_interval]))',
                    "{{event_type}}",
                )
            ],
        ),
    ]


def _level(metric: str) -> str:
    return f'{metric}{{job="{JOB}"}}'


def _rate(metric: str, by: str) -> Query:
    return f"sum by ({by}) (rate({_level(metric)}[$__rate_interval]))", f"{{{{{by}}}}}"
