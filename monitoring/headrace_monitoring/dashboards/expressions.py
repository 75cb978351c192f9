"""PromQL, and the selections that the variables at the top of a dashboard make.

In an expression `@` stands for the workers selected, `@queue` for the queues, `@process` for the processes: queue
levels come from the exporter, too, and what a process shows of itself knows no model. `@gateway` and `@neuron` stand
for all replicas of the gateway and for all Neuron monitors, which know no model either.

Every worker of a queue, and the exporter, reads the same levels from Redis, so these are joined with `max`, never with
`sum`.
"""

from __future__ import annotations

Query = tuple[str, str]
"""Expression and legend."""

_SELECTIONS = {
    "@queue": 'model=~"$model",queue=~"$queue"',
    "@gateway": 'job="headrace-gateway"',
    "@neuron": 'job="neuron-monitor"',
    "@process": 'job=~"$job",instance=~"$instance"',
    "@": 'job=~"$job",model=~"$model",instance=~"$instance"',
}


def selected(expression: str) -> str:
    """The expression as Grafana gets it."""
    for placeholder, selection in _SELECTIONS.items():
        expression = expression.replace(placeholder, selection)
    return expression


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Events a second, summed over workers or replicas of the gateway."""
    processes = "@gateway" if metric.startswith("gateway_") else "@"
    return f"sum{_by(by)}(rate(headrace_{metric}{{{processes}{where}}}[$__rate_interval]))"


def rate_by(metric: str, label: str, where: str = "") -> Query:
    """Events a second for each value of a label."""
    return rate(metric, label, where), f"{{{{{label}}}}}"


def increase_by(metric: str, label: str) -> Query:
    """Events within the last hour for each value of a label."""
    return f"sum by ({label}) (increase(headrace_{metric}{{@}}[1h]))", f"{{{{{label}}}}}"


def mean(histogram: str, by: str = "") -> str:
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


def quantile(q: float, histogram: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels)})"


def quantiles(histogram: str) -> list[Query]:
    """p50, p95, p99 and the mean."""
    return [*((quantile(q, histogram), f"p{round(q * 100)}") for q in (0.5, 0.95, 0.99)), (mean(histogram), "mean")]


def share_within(histogram: str, objective: float, window: str) -> str:
    """The exact share of observations up to an objective; works because the objective is a bucket's bound."""
    within = f'sum(rate(headrace_{histogram}_bucket{{@,le="{objective}"}}[{window}]))'
    return f"{within} / sum(rate(headrace_{histogram}_count{{@}}[1h]))"


def queue_level(metric: str, by: str, where: str = "") -> str:
    """A level that several processes read from Redis."""
    return f"max by ({by}) (headrace_{metric}{{@queue{where}}})"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
