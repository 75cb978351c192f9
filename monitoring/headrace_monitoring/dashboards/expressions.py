"""PromQL expressions, and the label selectors of a dashboard's variables.

Placeholders in an expression:

    @         the selected workers
    @queue    the selected queues, from workers and from the exporter
    @process  the selected processes; metrics of a process have no label `model`
    @gateway  all replicas of the gateway
    @neuron   all Neuron monitors

All workers of a queue and the exporter report the same levels of the queue. Aggregate them with `max`, not with `sum`.
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
    """Return the expression with its placeholders replaced."""
    for placeholder, selection in _SELECTIONS.items():
        expression = expression.replace(placeholder, selection)
    return expression


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Return the events per second, summed over workers or replicas of the gateway."""
    processes = "@gateway" if metric.startswith("gateway_") else "@"
    return f"sum{_by(by)}(rate(headrace_{metric}{{{processes}{where}}}[$__rate_interval]))"


def rate_by(metric: str, label: str, where: str = "") -> Query:
    """Return the events per second for each value of a label."""
    return rate(metric, label, where), f"{{{{{label}}}}}"


def increase_by(metric: str, label: str) -> Query:
    """Return the events of the last hour for each value of a label."""
    return f"sum by ({label}) (increase(headrace_{metric}{{@}}[1h]))", f"{{{{{label}}}}}"


def mean(histogram: str, by: str = "") -> str:
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


def quantile(q: float, histogram: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels)})"


def quantiles(histogram: str) -> list[Query]:
    """Return p50, p95, p99 and the mean."""
    return [*((quantile(q, histogram), f"p{round(q * 100)}") for q in (0.5, 0.95, 0.99)), (mean(histogram), "mean")]


def share_within(histogram: str, objective: float, window: str) -> str:
    """Return the exact share of observations up to an objective, which must be the upper bound of a bucket."""
    within = f'sum(rate(headrace_{histogram}_bucket{{@,le="{objective}"}}[{window}]))'
    return f"{within} / sum(rate(headrace_{histogram}_count{{@}}[1h]))"


def queue_level(metric: str, by: str, where: str = "") -> str:
    """Return a current value of a queue. Several processes report it, so take their maximum."""
    return f"max by ({by}) (headrace_{metric}{{@queue{where}}})"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
