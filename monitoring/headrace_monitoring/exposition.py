"""Renders metrics in the two formats that Prometheus reads, and chooses one for each scrape.

Only OpenMetrics has exemplars: the id of a trace beside a bucket of a histogram. A client that does not accept
OpenMetrics gets the text format.

prometheus_client's own two writers escape every label of every series at each scrape, character by character, which
takes most of the time of a scrape. Label sets are closed, so the text of each series is made once and cached.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

_number: Callable[[float], str] = floatToGoString  # the function has no annotations


class ExpositionFormat(enum.Enum):
    """The value is the content type of the response."""

    TEXT = CONTENT_TYPE_LATEST
    OPENMETRICS = openmetrics.CONTENT_TYPE_LATEST

    @classmethod
    def asked_for(cls, accept: str) -> ExpositionFormat:
        """Return OpenMetrics if the header `Accept` names its version 1, the text format otherwise."""
        for entry in accept.lower().split(","):
            media_type, *pairs = (part.strip() for part in entry.split(";"))
            parameters = {name: value.strip('"') for name, _, value in (pair.partition("=") for pair in pairs)}
            version, weight = parameters.get("version", "1"), parameters.get("q", "1")
            refused = weight.strip("0.") == ""  # "q=0" excludes the media type
            if media_type == "application/openmetrics-text" and version.partition(".")[0] == "1" and not refused:
                return cls.OPENMETRICS
        return cls.TEXT


def render(registry: CollectorRegistry, form: ExpositionFormat) -> bytes:
    """Return all metrics of the registry as text. They must be counters, gauges or histograms."""
    is_openmetrics = form is ExpositionFormat.OPENMETRICS
    lines: list[str] = []
    for family in registry.collect():
        lines += _header(family, is_openmetrics)
        for sample in family.samples:
            line = f"{_series(sample.name, tuple(sample.labels.items()))} {_number(sample.value)}"
            if sample.exemplar is not None and is_openmetrics:
                line += _exemplar(sample.exemplar)
            lines.append(line)
    if is_openmetrics:
        lines.append("# EOF")
    return ("\n".join(lines) + "\n").encode()


def _header(family: Metric, is_openmetrics: bool) -> tuple[str, str]:
    assert family.type in ("counter", "gauge", "histogram"), family.type
    name = family.name if is_openmetrics or family.type != "counter" else f"{family.name}_total"
    return f"# HELP {name} {_escaped(family.documentation)}", f"# TYPE {name} {family.type}"


@functools.lru_cache(maxsize=32768)
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return name
    return f"{name}{{{','.join(_pair(label, value) for label, value in sorted(labels))}}}"


def _exemplar(exemplar: Exemplar) -> str:
    labels = ",".join(_pair(label, value) for label, value in sorted(exemplar.labels.items()))
    return f" # {{{labels}}} {_number(exemplar.value)} {exemplar.timestamp}"


def _pair(label: str, value: str) -> str:
    escaped = _escaped(value).replace('"', r"\"")
    return f'{label}="{escaped}"'


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
