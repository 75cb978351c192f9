"""The metrics of one engine for `LLM.get_metrics`, with vLLM's classes and names.

The service has metrics of its own, which the worker derives from the same statistics.
"""

import math
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import accumulate

from headrace_engine.core.outputs import StepStats
from headrace_engine.requests.outputs import RequestOutput


@dataclass(slots=True)
class Metric:
    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """A value that only grows."""

    value: int


@dataclass(slots=True)
class Gauge(Metric):
    """A value that can go up and down."""

    value: float


@dataclass(slots=True)
class Vector(Metric):
    """One counter for each position in a draft."""

    values: list[int]


@dataclass(slots=True)
class Histogram(Metric):
    """Cumulative number of observations up to each bound. The last bound is +Inf."""

    count: int
    sum: float
    buckets: dict[str, int]


_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, math.inf)


class _Observations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._counts = [0] * len(_BOUNDS)

    def add(self, seconds: float) -> None:
        self._sum += seconds
        self._counts[bisect_left(_BOUNDS, seconds)] += 1

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        names = [f"{bound:g}" for bound in _BOUNDS[:-1]] + ["+Inf"]
        counts = [*accumulate(self._counts)]
        return Histogram(name, labels, counts[-1], self._sum, dict(zip(names, counts, strict=True)))


class EngineMetrics:
    """Accumulates the statistics of all steps.

    Args:
        reported: the fields of `StepStats` that the engine reports. Metrics of other fields are omitted.
    """

    def __init__(self, model: str, reported: Collection[str]) -> None:
        self._reported = reported
        self._labels = {"model_name": model, "engine": "0"}
        self._last = StepStats()
        self._counts: Tally[str] = Tally()
        self._finished: Tally[str] = Tally()
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._first_token, self._whole = _Observations(), _Observations()

    def observe(self, stats: StepStats, num_new_tokens: int, outputs: Iterable[RequestOutput]) -> None:
        """Add a step.

        Args:
            num_new_tokens: number of tokens that the step generated.
            outputs: the outputs of the step.
        """
        self._last = stats
        self._counts["generation_tokens"] += num_new_tokens
        self._counts["num_preemptions"] += stats.preemptions
        self._counts["prefix_cache_queries"] += stats.prefix_queried_tokens
        self._counts["prefix_cache_hits"] += stats.prefix_hit_tokens
        _add(self._drafted, stats.drafted_per_position)
        _add(self._accepted, stats.accepted_per_position)
        for output in outputs:
            if output.finished:
                self._counts["prompt_tokens"] += len(output.prompt_token_ids)
                if output.metrics is not None and output.metrics.first_token_ts:
                    self._first_token.add(output.metrics.first_token_latency)
                    self._whole.add(output.metrics.last_token_ts - output.metrics.queued_ts)
                for choice in output.outputs:
                    self._finished[choice.finish_reason or "error"] += 1

    def snapshot(self, *, idle: bool) -> list[Metric]:
        """Return all metrics.

        Args:
            idle: whether no request is left. Then gauges are 0. The last step counted requests that it finished.
        """
        last = StepStats() if idle else self._last
        used = last.kv_blocks_used / last.kv_blocks_total if last.kv_blocks_total else 0.0
        metrics: list[Metric] = [
            Gauge(f"vllm:{name}", self._labels, level)
            for name, level, source in (
                ("num_requests_running", last.running, "running"),
                ("num_requests_waiting", last.waiting, "waiting"),
                ("kv_cache_usage_perc", used, "kv_blocks_used"),
            )
            if source in self._reported
        ]
        metrics += [
            Counter(f"vllm:{name}", self._labels, self._counts[name])
            for name, source in (
                ("prompt_tokens", None),
                ("generation_tokens", None),
                ("num_preemptions", "preemptions"),
                ("prefix_cache_queries", "prefix_queried_tokens"),
                ("prefix_cache_hits", "prefix_hit_tokens"),
            )
            if source is None or source in self._reported
        ]
        metrics += [
            Counter("vllm:request_success", {**self._labels, "finished_reason": reason}, count)
            for reason, count in sorted(self._finished.items())
        ]
        metrics += [
            self._first_token.histogram("vllm:time_to_first_token_seconds", self._labels),
            self._whole.histogram("vllm:e2e_request_latency_seconds", self._labels),
        ]
        if self._drafted:
            metrics += [
                Counter("vllm:spec_decode_num_drafts", self._labels, self._drafted[0]),
                Counter("vllm:spec_decode_num_draft_tokens", self._labels, sum(self._drafted)),
                Counter("vllm:spec_decode_num_accepted_tokens", self._labels, sum(self._accepted)),
                Vector("vllm:spec_decode_num_accepted_tokens_per_pos", self._labels, [*self._accepted]),
            ]
        return metrics


def _add(totals: list[int], counts: list[int]) -> None:
    totals += [0] * (len(counts) - len(totals))
    for position, count in enumerate(counts):
        totals[position] += count
