"""The numbers of a step that each series needs, and the collector that omits series which the engine cannot fill.

A series that is never set would stay 0, and a reader would take the 0 for a measurement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

SOURCES: Final[Mapping[str, tuple[str, ...]]] = {
    "headrace_engine_queue_seconds": ("admitted_choice_ids",),
    "headrace_engine_prefill_seconds": ("admitted_choice_ids",),
    "headrace_engine_requests": ("{state}",),
    "headrace_engine_lora_requests": ("lora_requests",),
    "headrace_engine_step_seconds": ("step_seconds", "kind", "num_tokens"),
    "headrace_engine_step_tokens": ("num_tokens",),
    "headrace_engine_step_requests": ("num_requests", "num_tokens"),
    "headrace_engine_phase_seconds": ("phase_seconds.{phase}",),
    "headrace_engine_preemptions": ("preemptions",),
    "headrace_kv_cache_usage_ratio": ("kv_blocks_used", "kv_blocks_total"),
    "headrace_kv_cache_blocks": ("kv_blocks_{state}",),
    "headrace_prefix_cache_queried_tokens": ("prefix_queried_tokens",),
    "headrace_prefix_cache_hit_tokens": ("prefix_hit_tokens",),
    "headrace_engine_padded_tokens": ("num_padded_tokens",),
    "headrace_engine_compiled_graphs": ("compiled_graphs",),
    "headrace_engine_fallback_operators": ("fallback_operators",),
    "headrace_engine_warm_up_seconds": ("warm_up_seconds",),
    "headrace_draft_tokens": ("drafted_per_position",),
    "headrace_draft_accepted_tokens": ("accepted_per_position",),
}
"""By family: the names of all numbers that it needs. `{label}` stands for the value of that label."""


class StepFamilies(Collector):
    """Collects the families of `registry` without the series that the engine cannot fill."""

    def __init__(self) -> None:
        self.registry: Final = CollectorRegistry()
        self._numbers: frozenset[str] | None = None
        self._shown: dict[tuple[str, ...], bool] = {}
        """Cache: whether to show a series, by family and label values. Every scrape reads every series."""

    def report_only(self, numbers: Collection[str]) -> None:
        """Set the numbers that the engine reports after each step.

        Args:
            numbers: names of `metrics.StepNumbers`; `phase_seconds.schedule` is one phase, `phase_seconds` all of them.
        """
        self._numbers = frozenset(numbers)
        self._shown = {}

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for family in self.registry.collect():
            if self._numbers is not None:
                family.samples = [sample for sample in family.samples if self._shows(family.name, sample.labels)]
            if family.samples:
                yield family

    def _shows(self, family: str, labels: Mapping[str, str]) -> bool:
        series = (family, *labels.values())
        if series not in self._shown:
            assert self._numbers is not None
            needed = [source.format_map(labels) for source in SOURCES[family]]
            self._shown[series] = all(not self._numbers.isdisjoint((name, name.partition(".")[0])) for name in needed)
        return self._shown[series]
