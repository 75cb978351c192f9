"""Families of metrics whose values are read at a poll and not counted in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace_monitoring.families import PREFIX

Samples: TypeAlias = Iterable[tuple[Mapping[str, str], float]]
"""Labels and value of each series of a metric."""


def gauge(name: str, documentation: str, samples: Samples) -> Metric:
    """Return the gauge headrace_<name>. All samples have the same labels."""
    return _filled(GaugeMetricFamily, name, documentation, samples)


def counter(name: str, documentation: str, samples: Samples) -> Metric:
    """Return the counter headrace_<name>_total. All samples have the same labels."""
    return _filled(CounterMetricFamily, name, documentation, samples)


def _filled(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, documentation: str, samples: Samples
) -> Metric:
    samples = list(samples)
    family = kind(PREFIX + name, documentation, labels=list(samples[0][0]) if samples else [])
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family
