"""The dashboards as pictures, drawn from a running Prometheus: for eyes on a machine without Grafana.

What is drawn is the JSON that Grafana reads, with every variable set to "all". One SVG file a dashboard.
"""

from __future__ import annotations

import html
import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_monitoring.dashboards import rendered
from headrace_monitoring.dashboards.drawing import BACKGROUND, TEXT, Box, Series, Span, panel, text
from headrace_monitoring.errors import PrometheusError

WIDTH = 1600.0
GRID_COLUMNS = 24
GRID_HEIGHT = 38.0
GAP = 8.0
HEADER = 44.0
POINTS = 160
VARIABLES = {"$job": ".*", "$model": ".*", "$queue": ".*", "$instance": ".*"}


def with_variables(expression: str, rate_interval: str) -> str:
    """A panel's query as Grafana asks it with everything selected."""
    for name, value in {**VARIABLES, "$__rate_interval": rate_interval}.items():
        expression = expression.replace(name, value)
    return expression


class Preview:
    """Draws dashboards from what a Prometheus knows of the last minutes.

    Args:
        url: of the Prometheus.
        seconds: how far back.
        rate_interval: what `$__rate_interval` stands for; four scrape intervals at least.
        end: unix time of the right edge, now unless given.
    """

    def __init__(
        self, url: str, seconds: float = 900.0, rate_interval: str = "30s", *, end: float | None = None
    ) -> None:
        self._url = url.rstrip("/")
        end = time.time() if end is None else end
        self._span = Span(end - seconds, end)
        self._rate_interval = rate_interval

    def write(self, folder: Path) -> list[Path]:
        """One file a dashboard. Raises PrometheusError and OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, definition in rendered().items():
            path = folder / f"{name.removesuffix('.json')}.svg"
            path.write_text(self.draw(json.loads(definition)), encoding="utf-8")
            written.append(path)
        return written

    def draw(self, dashboard: Mapping[str, Any]) -> str:
        """One dashboard's JSON as SVG. Raises PrometheusError."""
        bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
        height = HEADER + bottom * GRID_HEIGHT + GAP
        size = f'width="{WIDTH:.0f}" height="{height:.0f}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="DejaVu Sans, sans-serif">',
            f'<rect width="100%" height="100%" fill="{BACKGROUND}"/>',
            text(GAP, 28, dashboard["title"], size=19, colour=TEXT),
        ]
        for definition in dashboard["panels"]:
            box = _box(definition["gridPos"])
            if definition["type"] == "row":
                parts.append(text(box.x, box.y + 24, definition["title"], size=15, colour=TEXT))
            else:
                parts.append(panel(definition, self._series(definition), box, self._span))
        return "".join([*parts, "</svg>\n"])

    def _series(self, definition: Mapping[str, Any]) -> list[Series]:
        return [
            Series(_legend(target["legendFormat"], found["metric"]), _finite(found["values"]))
            for target in definition["targets"]
            for found in self._ask(target["expr"])
        ]

    def _ask(self, expression: str) -> list[dict[str, Any]]:
        span = self._span
        query = {
            "query": with_variables(expression, self._rate_interval),
            "start": f"{span.start:.3f}",
            "end": f"{span.end:.3f}",
            "step": f"{(span.end - span.start) / POINTS:.3f}",
        }
        address = f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as response:  # noqa: S310  # the operator's own Prometheus
                answer = json.load(response)
        except (OSError, ValueError) as error:
            said = error.read(500).decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else str(error)
            raise PrometheusError(self._url, said) from error
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


def _box(place: Mapping[str, float]) -> Box:
    column = WIDTH / GRID_COLUMNS
    return Box(
        place["x"] * column + GAP / 2,
        HEADER + place["y"] * GRID_HEIGHT,
        place["w"] * column - GAP,
        place["h"] * GRID_HEIGHT - GAP,
    )


def _legend(form: str, labels: Mapping[str, str]) -> str:
    return html.unescape(re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), form)).strip()


def _finite(values: list[list[Any]]) -> list[tuple[float, float]]:
    return [(at, float(value)) for at, value in values if math.isfinite(float(value))]
