"""`StreamTiming`: the latencies of one stream, as its subscriber measures them, and statistics of many streams."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class StreamTiming:
    """Arrival times of one request's chunks, in seconds of one monotonic clock."""

    sent_at: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def arrived(self, now: float, num_tokens: int) -> None:
        self.arrivals.append(now)
        self.num_tokens += num_tokens

    @property
    def time_to_first_token(self) -> float | None:
        return self.arrivals[0] - self.sent_at if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


def summarise(timings: Iterable[StreamTiming]) -> dict[str, float]:
    """Compute p50 and p99 of TTFT and inter-token latency in seconds, output tokens, and output tokens a second."""
    timings = list(timings)
    first = [value for timing in timings if (value := timing.time_to_first_token) is not None]
    gaps = [gap for timing in timings for gap in timing.gaps]
    begin = min(timing.sent_at for timing in timings)
    end = max((timing.arrivals[-1] for timing in timings if timing.arrivals), default=begin)
    num_tokens = sum(timing.num_tokens for timing in timings)
    return {
        "ttft_p50": percentile(first, 50),
        "ttft_p99": percentile(first, 99),
        "itl_p50": percentile(gaps, 50),
        "itl_p99": percentile(gaps, 99),
        "output_tokens": num_tokens,
        "output_tokens_per_second": num_tokens / (end - begin) if end > begin else 0.0,
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """Compute a percentile, interpolated linearly between the two nearest values. 0 without values."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
