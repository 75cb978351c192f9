"""Panel types, and the layout of a dashboard. Needs grafana-foundation-sdk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from headrace_monitoring.dashboards.expressions import Query, quantiles, selected

DATA_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS = 24
TAG = "headrace"

Panel = timeseries.Panel | stat.Panel | heatmap.Panel | statetimeline.Panel
"""A panel without title and position. `build` sets them."""
Row = Mapping[str, Panel]
"""Panels by title."""
Thresholds = Sequence[tuple[float | None, str]]
"""Pairs of lowest value and colour. The value of the first is None."""


def graph(description: str, *queries: Query, unit: str = "none") -> timeseries.Panel:
    """Return a panel of lines over time."""
    panel = timeseries.Panel().description(description).unit(unit).min(0).fill_opacity(5).height(8)
    for query in queries:
        panel.with_target(_target(*query))
    return panel


def stack(description: str, *queries: Query, unit: str = "none", colours: Mapping[str, str] | None = None) -> Panel:
    """Return a panel of stacked lines over time. `colours` maps legends to fixed colours."""
    panel = graph(description, *queries, unit=unit).fill_opacity(30)
    panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for legend, colour in (colours or {}).items():
        fixed = dashboard.FieldColor().mode(FieldColorModeId.FIXED).fixed_color(colour).build()
        panel.override_by_name(legend, [DynamicConfigValue("color", fixed)])
    return panel


def share(description: str, *queries: Query) -> Panel:
    """Return a panel of shares over time, on a scale from 0 to 100%."""
    return graph(description, *queries, unit="percentunit").max(1)


def latency(description: str, histogram: str) -> Panel:
    """Return a panel of the quantiles and the mean of a histogram of seconds, with exemplars that link to traces."""
    first, *others = quantiles(histogram)
    # one query with exemplars is enough: all queries read the same histogram
    panel = graph(description, unit="s").with_target(_target(*first).exemplar(True))
    for query in others:
        panel.with_target(_target(*query))
    return panel


def number(
    title: str, description: str, unit: str, expression: str, thresholds: Thresholds = ((None, "blue"),)
) -> tuple[str, Panel]:
    """Return the title and a panel of one number. The title is also the legend."""
    steps = [Threshold(value, colour) for value, colour in thresholds]
    panel = (
        stat.Panel()
        .description(description)
        .unit(unit)
        .thresholds(dashboard.ThresholdsConfig().steps(steps))
        .height(4)
        .with_target(_target(expression, title))
    )
    return title, panel


def distribution(description: str, unit: str, histogram: str) -> Panel:
    """Return a heat map of a histogram over time."""
    expression = f"sum by (le) (increase(headrace_{histogram}_bucket{{@}}[$__rate_interval]))"
    return (
        heatmap.Panel()
        .description(description)
        .unit(unit)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .height(8)
        .with_target(_target(expression, "{{le}}").format(PromQueryFormat.HEATMAP))
    )


OFF_ON = (("Off", "red"), ("On", "green"))


def states(description: str, *queries: Query, names: Sequence[tuple[str, str]] = OFF_ON) -> Panel:
    """Return a panel of states over time, one bar per series. `names`: the name and colour of the values 0, 1, 2..."""
    meanings = {str(value): ValueMappingResult(name, colour, index=value) for value, (name, colour) in enumerate(names)}
    panel = (
        statetimeline.Panel()
        .description(description)
        .unit("none")
        .mappings([ValueMap(meanings)])
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .thresholds(dashboard.ThresholdsConfig().steps([Threshold(None, "text")]))  # the mappings have the colours
        .height(8)
    )
    for query in queries:
        panel.with_target(_target(*query))
    return panel


def build(uid: str, name: str, description: str, rows: Mapping[str, Row]) -> dashboard.Dashboard:
    """Return a dashboard with the variables and links that all dashboards share. `rows` maps titles to rows."""
    built = (
        dashboard.Dashboard(name)
        .uid(uid)
        .description(description)
        .tags([TAG, "llm"])
        .readonly()
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Headrace")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("job", "Job", "headrace_build_info"))
        .with_variable(_variable("model", "Model", "headrace_queue_messages"))
        .with_variable(_variable("queue", "Queue", 'headrace_queue_messages{model=~"$model"}'))
        .with_variable(_variable("instance", "Instance", 'headrace_build_info{job=~"$job",model=~"$model"}'))
    )
    ids = itertools.count(1)  # links to a panel contain its id
    for row, panels in rows.items():
        built.with_row(dashboard.Row(row).id(next(ids)))
        for (title, panel), width in zip(panels.items(), _widths([*panels.values()]), strict=True):
            built.with_panel(panel.title(title).datasource(DATA_SOURCE).span(width).id(next(ids)))
    return built


def _widths(panels: Sequence[Panel]) -> list[int]:
    """Return the width of each panel in columns. Numbers share one line. Other panels fill lines of three or two."""
    if all(isinstance(panel, stat.Panel) for panel in panels):
        return [COLUMNS // len(panels)] * len(panels)
    if len(panels) == 1:
        return [COLUMNS]
    in_twos = (0, 4, 2)[len(panels) % 3]
    return [COLUMNS // 3] * (len(panels) - in_twos) + [COLUMNS // 2] * in_twos


def render(built: dashboard.Dashboard) -> str:
    """Return the dashboard as JSON. The output is deterministic."""
    return json.dumps(built.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _target(expression: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(DATA_SOURCE).range().expr(selected(expression)).legend_format(legend)


def _variable(name: str, label: str, series: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATA_SOURCE)
        .query(f"label_values({series}, {name})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )
