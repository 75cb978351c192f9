"""What AWS's `neuron-monitor-prometheus.py` exposes, by its user guide and by scrapes that other projects published."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

# Of each family the labels that tell its series apart; all carry those of the machine besides.
_GAUGES: dict[str, dict[str, list[str]]] = {
    "neuroncore_utilization_ratio": {"neuroncore": ["0", "1"]},
    "neuroncore_memory_usage_tensors": {"neuroncore": ["0", "1"]},
    "neuroncore_memory_usage_constants": {"neuroncore": ["0", "1"]},
    "neuroncore_memory_usage_model_code": {"neuroncore": ["0", "1"]},
    "neuroncore_memory_usage_model_shared_scratchpad": {"neuroncore": ["0", "1"]},
    "neuroncore_memory_usage_runtime_memory": {"neuroncore": ["0", "1"]},
    "neuron_runtime_memory_used_bytes": {"memory_location": ["host", "neuron_device"]},
    "execution_latency_seconds": {"percentile": ["p0", "p50", "p99", "p100"]},
}
_COUNTERS: dict[str, dict[str, list[str]]] = {
    "execution_status_total": {"status_type": ["completed", "timed_out", "failed_to_queue"]},
    "execution_errors_total": {"error_type": ["generic", "hardware", "runtime"]},
    "hardware_ecc_events_total": {"event_type": ["mem_ecc_corrected", "mem_ecc_uncorrected"]},
}
FAMILIES = _GAUGES | _COUNTERS


def registry() -> CollectorRegistry:
    """One machine with a device of two cores."""
    found = CollectorRegistry()
    machine = {"instance_id": "i-0", "instance_type": "trn2.3xlarge", "region": "us-east-1", "runtime_tag": "7"}
    for kind, families in ((Gauge, _GAUGES), (Counter, _COUNTERS)):
        for name, labels in families.items():
            ((label, values),) = labels.items()
            family = kind(name, name, [label, *machine], registry=found)
            for value in values:
                family.labels(value, *machine.values()).inc()
    return found
