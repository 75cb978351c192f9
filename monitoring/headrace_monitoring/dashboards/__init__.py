"""The Grafana dashboards as code: `python -m headrace_monitoring.dashboards` writes them as JSON.

Each dashboard has a module. They need grafana-foundation-sdk, a development dependency. The JSON is committed, so that
Grafana can load it from a checkout. A test compares it with this code.
"""

from __future__ import annotations

from pathlib import Path

from headrace_monitoring.dashboards import engine, fleet, gateway, neuron, overview, tenants
from headrace_monitoring.dashboards.panels import render

FOLDER = Path(__file__).resolve().parents[2] / "grafana" / "dashboards"

DASHBOARDS = {
    "overview": overview.dashboard,
    "engine": engine.dashboard,
    "fleet": fleet.dashboard,
    "tenants": tenants.dashboard,
    "gateway": gateway.dashboard,
    "neuron": neuron.dashboard,
}


def rendered() -> dict[str, str]:
    """Return the JSON of every dashboard, by file name."""
    return {f"{name}.json": render(dashboard()) for name, dashboard in DASHBOARDS.items()}


def write(folder: Path = FOLDER) -> None:
    """Write the files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (folder / name).write_text(text, encoding="utf-8")
