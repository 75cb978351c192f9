"""A panel as SVG: frame, title, and what its kind of panel shows of some series. How Grafana draws, roughly.

Nothing here asks Prometheus: `preview.py` does. Sizes are pixels, times unix seconds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

PALETTE = ("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#b877d9", "#e02f44", "#8ab8ff", "#ffb357", "#c0d8ff", "#96d98d")
COLOURS = {
    "green": "#73bf69",
    "yellow": "#f2cc0c",
    "orange": "#ff9830",
    "red": "#f2495c",
    "blue": "#5794f2",
    "purple": "#b877d9",
    "text": "#8e8e8e",
}
BACKGROUND, PANEL, EDGE, TEXT, FAINT = "#111217", "#181b1f", "#2c3235", "#d8d9da", "#8e8e8e"
LEGEND_LINES = 3
NO_DATA = "No data"
_CHARACTER = 0.62
"""Mean width of a character, as a share of the font's size."""


@dataclass(frozen=True)
class Series:
    legend: str
    points: list[tuple[float, float]]
    """Time and value; finite."""


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Span:
    """The time that is shown."""

    start: float
    end: float

    def place(self, at: float, box: Box) -> float:
        return box.x + (at - self.start) / (self.end - self.start) * box.width


def number(value: float, unit: str) -> str:
    """A value as Grafana writes it. Raises KeyError for a unit that no panel had so far."""
    if unit.startswith("suffix:"):
        return _plain(value) + unit.removeprefix("suffix:")
    return _UNITS[unit](value)


def _plain(value: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{'K' if letter == 'k' else letter}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _seconds(value: float) -> str:
    for limit, size, name in ((1e-3, 1e-6, "µs"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if abs(value) < limit:
            return f"{value / size:.3g} {name}" if value else "0 s"
    return f"{value / 3600:.3g} h"


def _bytes(value: float) -> str:
    for limit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {name}"
    return f"{value:.0f} B"


_UNITS: dict[str, Callable[[float], str]] = {
    "none": _plain,
    "s": _seconds,
    "bytes": _bytes,
    "percentunit": lambda value: f"{100 * value:.3g}%",
    "reqps": lambda value: f"{_plain(value)} req/s",
    "ops": lambda value: f"{_plain(value)} ops/s",
    "mps": lambda value: f"{_plain(value)} msg/s",
}


def text(x: float, y: float, words: str, *, size: int = 11, colour: str = FAINT, anchor: str = "start") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}">{escape(words)}</text>'


def clipped(words: str, width: float, size: int = 11) -> str:
    """As much of a sentence as fits."""
    most = int(width / (size * _CHARACTER))
    return words if len(words) <= most else words[: max(most - 1, 0)] + "…"


def panel(definition: Mapping[str, Any], series: Sequence[Series], box: Box, span: Span) -> str:
    """One panel of a dashboard's JSON. Raises KeyError for a kind of panel that none had so far."""
    title = clipped(definition["title"], box.width - 20, 13)
    frame = f'x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{box.height:.0f}"'
    parts = [
        f'<rect {frame} rx="2" fill="{PANEL}" stroke="{EDGE}"/>',
        text(box.x + 8, box.y + 19, title, size=13, colour=TEXT),
    ]
    inside = Box(box.x + 8, box.y + 30, box.width - 16, box.height - 36)
    if not any(one.points for one in series):
        middle = inside.x + inside.width / 2
        parts.append(text(middle, inside.y + inside.height / 2, NO_DATA, size=13, anchor="middle"))
    else:
        parts += _KINDS[definition["type"]](definition, series, inside, span)
    return "".join(parts)


def _unit(definition: Mapping[str, Any]) -> str:
    return str(definition["fieldConfig"]["defaults"].get("unit", "none"))


def _stat(definition: Mapping[str, Any], series: Sequence[Series], box: Box, _: Span) -> Iterator[str]:
    value = series[0].points[-1][1]
    steps = definition["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
    passed = [step["color"] for step in steps if step.get("value") is None or value >= step["value"]]
    colour = COLOURS[passed[-1]] if passed else TEXT
    words = number(value, _unit(definition))
    size = int(min(box.height * 0.6, box.width / (len(words) * _CHARACTER)))
    yield text(
        box.x + box.width / 2, box.y + box.height / 2 + size / 3, words, size=size, colour=colour, anchor="middle"
    )


def _graph(definition: Mapping[str, Any], series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    unit = _unit(definition)
    legend = [f"{one.legend} {number(one.points[-1][1], unit)}" for one in series if one.points]
    lines = _legend_lines(legend, box.width)
    plot = Box(box.x + 62, box.y, box.width - 70, box.height - 18 - 14 * len(lines))
    custom = definition["fieldConfig"]["defaults"].get("custom", {})
    is_stacked = custom.get("stacking", {}).get("mode") == "normal"
    shown = [one for one in series if one.points]
    tops = _stacked(shown) if is_stacked else [dict(one.points) for one in shown]
    reached = max(value for top in tops for value in top.values())
    highest = max(definition["fieldConfig"]["defaults"].get("max", 0), _round_up(reached, 2 if unit == "bytes" else 10))
    colours = _colours(definition, shown)
    yield from _axes(plot, span, highest, unit)
    below: dict[float, float] = {}
    for index, top in enumerate(tops):
        colour = colours[index]
        line = [(span.place(at, plot), _height(value, highest, plot)) for at, value in sorted(top.items())]
        if is_stacked:
            floor = [
                (span.place(at, plot), _height(below.get(at, 0.0), highest, plot)) for at in sorted(top, reverse=True)
            ]
            yield f'<polygon points="{_points([*line, *floor])}" fill="{colour}" fill-opacity="0.3"/>'
            below |= top
        for part in _unbroken(line):
            if len(part) == 1:
                yield f'<circle cx="{part[0][0]:.1f}" cy="{part[0][1]:.1f}" r="1.5" fill="{colour}"/>'
            yield f'<polyline points="{_points(part)}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
    yield from _legend(lines, colours, Box(box.x, plot.y + plot.height + 20, box.width, 0))


def _unbroken(line: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """The parts of a line between its gaps: nothing was there to be measured, and nothing is drawn."""
    step = min((later[0] - sooner[0] for sooner, later in itertools.pairwise(line)), default=0.0)
    part: list[tuple[float, float]] = []
    for point in line:
        if part and point[0] - part[-1][0] > 1.5 * step:
            yield part
            part = []
        part.append(point)
    yield part


def _stacked(series: Sequence[Series]) -> list[dict[float, float]]:
    """Each series on the sum of those before it."""
    times = sorted({at for one in series for at, _ in one.points})
    total = dict.fromkeys(times, 0.0)
    tops = []
    for one in series:
        values = dict(one.points)
        total = {at: below + values.get(at, 0.0) for at, below in total.items()}
        tops.append(total)
    return tops


def _heatmap(definition: Mapping[str, Any], series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    buckets = sorted((one for one in series if one.points), key=lambda one: float(one.legend))
    plot = Box(box.x + 62, box.y, box.width - 70, box.height - 18)
    pairs = itertools.chain.from_iterable(itertools.pairwise(one.points) for one in buckets)
    step = min((later[0] - sooner[0] for sooner, later in pairs), default=1.0)
    below: dict[float, float] = {}
    counts: list[tuple[int, float, float]] = []
    for row, bucket in enumerate(buckets):
        counts += [(row, at, value - below.get(at, 0.0)) for at, value in bucket.points]
        below = dict(bucket.points)
    most = max((count for _, _, count in counts), default=0.0)
    height = plot.height / len(buckets)
    for row, at, count in counts:
        if count > 1e-9:
            x = span.place(at, plot)
            width = max(1.0, step / (span.end - span.start) * plot.width)
            yield (
                f'<rect x="{x - width:.1f}" y="{plot.y + plot.height - (row + 1) * height:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}" fill="#ff9830" fill-opacity="{0.15 + 0.85 * count / most:.2f}"/>'
            )
    every = max(1, round(len(buckets) / (plot.height / 14)))
    for row in range(0, len(buckets), every):
        bound = float(buckets[row].legend)
        words = "Inf" if math.isinf(bound) else number(bound, _unit(definition))
        yield text(plot.x - 6, plot.y + plot.height - row * height - height / 2 + 4, words, anchor="end", size=10)
    yield from _clock(plot, span)


def _states(definition: Mapping[str, Any], series: Sequence[Series], box: Box, span: Span) -> Iterator[str]:
    shown = [one for one in series if one.points]
    (mapping,) = definition["fieldConfig"]["defaults"]["mappings"]
    names = min(box.width / 2, 8 + max(len(one.legend) for one in shown) * 10 * _CHARACTER)
    plot = Box(box.x + names, box.y, box.width - names - 4, box.height - 18)
    height = min(40.0, plot.height / len(shown))
    for row, one in enumerate(shown):
        y = plot.y + row * height
        yield text(plot.x - 6, y + height / 2 + 4, clipped(one.legend, names, 10), size=10, anchor="end")
        for value, start, end in _runs(one.points, span.end):
            meaning = mapping["options"][f"{value:.0f}"]
            left, right = span.place(start, plot), span.place(end, plot)
            yield (
                f'<rect x="{left:.1f}" y="{y + 2:.1f}" width="{right - left:.1f}" height="{height - 4:.1f}" '
                f'fill="{COLOURS[meaning["color"]]}" fill-opacity="0.7"/>'
            )
            if right - left > (len(meaning["text"]) + 1) * 10 * _CHARACTER:
                yield text(
                    (left + right) / 2, y + height / 2 + 4, meaning["text"], size=10, colour=TEXT, anchor="middle"
                )
    yield from _clock(plot, span)


def _runs(points: Sequence[tuple[float, float]], end: float) -> Iterator[tuple[float, float, float]]:
    """Value, start and end of each stretch of one value."""
    starts = [points[0], *(later for sooner, later in itertools.pairwise(points) if sooner[1] != later[1])]
    for (start, value), (until, _) in zip(starts, [*starts[1:], (end, 0.0)], strict=True):
        yield value, start, until


def _axes(plot: Box, span: Span, highest: float, unit: str) -> Iterator[str]:
    for part in range(5):
        y = plot.y + plot.height * (1 - part / 4)
        yield f'<line x1="{plot.x:.0f}" x2="{plot.x + plot.width:.0f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{EDGE}"/>'
        yield text(plot.x - 6, y + 4, number(highest * part / 4, unit), anchor="end", size=10)
    yield from _clock(plot, span)


def _clock(plot: Box, span: Span) -> Iterator[str]:
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = span.start + part * (span.end - span.start)
        anchor = {0.0: "start", 1.0: "end"}.get(part, "middle")
        words = time.strftime("%H:%M", time.localtime(at))
        yield text(plot.x + part * plot.width, plot.y + plot.height + 12, words, anchor=anchor, size=9)


def _colours(definition: Mapping[str, Any], series: Sequence[Series]) -> list[str]:
    fixed = {
        override["matcher"]["options"]: COLOURS[entry["value"]["fixedColor"]]
        for override in definition["fieldConfig"].get("overrides", [])
        for entry in override["properties"]
        if entry["id"] == "color"
    }
    return [fixed.get(one.legend, PALETTE[index % len(PALETTE)]) for index, one in enumerate(series)]


def _legend_lines(words: Sequence[str], width: float) -> list[list[str]]:
    """The entries in lines, as many as there is room for."""
    lines: list[list[str]] = [[]]
    used = 0.0
    for entry in words:
        need = 24 + len(entry) * 11 * _CHARACTER
        if used + need > width and lines[-1]:
            if len(lines) == LEGEND_LINES:
                lines[-1][-1] = f"… {len(words) - sum(map(len, lines)) + 1} more"
                break
            lines.append([])
            used = 0.0
        lines[-1].append(entry)
        used += need
    return lines


def _legend(lines: Sequence[Sequence[str]], colours: Sequence[str], box: Box) -> Iterator[str]:
    index = 0
    for row, entries in enumerate(lines):
        x = box.x
        for entry in entries:
            y = box.y + 14 * row + 8
            yield f'<rect x="{x:.0f}" y="{y - 5:.0f}" width="12" height="3" fill="{colours[index]}"/>'
            yield text(x + 16, y, clipped(entry, box.width - 16), colour=TEXT)
            x += 24 + len(entry) * 11 * _CHARACTER
            index += 1


def _round_up(value: float, base: int) -> float:
    """The next 1, 2, 4 or 8 times a power of the base: a scale whose quarters are round."""
    if value <= 0:
        return 1.0
    power = float(base) ** math.floor(math.log(value, base) + 1e-9)
    return next(step * power for step in (1, 2, 4, 8, 10) if value <= step * power * (1 + 1e-9))


def _height(value: float, highest: float, plot: Box) -> float:
    return plot.y + plot.height * (1 - value / highest)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


_KINDS: dict[str, Callable[[Mapping[str, Any], Sequence[Series], Box, Span], Iterator[str]]] = {
    "stat": _stat,
    "timeseries": _graph,
    "heatmap": _heatmap,
    "state-timeline": _states,
}
