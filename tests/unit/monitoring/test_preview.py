"""Pictures of the dashboards, drawn from a stub of Prometheus's HTTP API."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree as ET

import pytest

from headrace_monitoring import dashboards
from headrace_monitoring.dashboards.drawing import Box, Series, Span, clipped, number, panel
from headrace_monitoring.dashboards.preview import Preview
from headrace_monitoring.errors import PrometheusError

SVG = "{http://www.w3.org/2000/svg}"


class StubPrometheus(BaseHTTPRequestHandler):
    """Two series for every query, or none, or an error; it cannot tell one query from another."""

    series = 2

    def do_GET(self) -> None:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        start, step = float(asked["start"]), float(asked["step"])
        values = [[start + i * step, "NaN" if i == 5 else str(i % 2)] for i in range(50)]
        labels = dict.fromkeys(("instance", "queue", "state", "model", "adapter"), "x<y&z")
        found = [{"metric": labels | {"le": le}, "values": values} for le in ("0.5", "+Inf")[: self.series]]
        body = json.dumps({"status": "success", "data": {"result": found}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def prometheus(request: pytest.FixtureRequest) -> Iterator[str]:
    handler = type("Stub", (StubPrometheus,), {"series": getattr(request, "param", 2)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def words(path: Path) -> list[str]:
    return [element.text or "" for element in ET.parse(path).iter(f"{SVG}text")]


def test_every_panel_of_every_dashboard_is_drawn(prometheus: str, tmp_path: Path) -> None:
    written = Preview(prometheus).write(tmp_path)
    assert {path.stem for path in written} == set(dashboards.DASHBOARDS)
    for path in written:
        drawn = words(path)
        definition = json.loads(dashboards.rendered()[f"{path.stem}.json"])
        for one in definition["panels"]:
            assert one["title"] in drawn
        assert "No data" not in drawn


def test_nothing_is_drawn_beyond_the_edges(prometheus: str, tmp_path: Path) -> None:
    for path in Preview(prometheus).write(tmp_path):
        root = ET.parse(path).getroot()
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for element in root.iter():
            x, y = (float(element.attrib.get(name, 0)) for name in ("x", "y"))
            if "%" not in element.attrib.get("width", ""):
                assert 0 <= x <= x + float(element.attrib.get("width", 0)) <= width, element.attrib
                assert 0 <= y <= y + float(element.attrib.get("height", 0)) <= height, element.attrib


@pytest.mark.parametrize("prometheus", [0], indirect=True)
def test_a_panel_without_data_says_so(prometheus: str, tmp_path: Path) -> None:
    (overview,) = (path for path in Preview(prometheus).write(tmp_path) if path.stem == "overview")
    panels = [one for one in json.loads(dashboards.rendered()["overview.json"])["panels"] if one["type"] != "row"]
    assert words(overview).count("No data") == len(panels)


def test_a_prometheus_that_is_away_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PrometheusError, match=r"the Prometheus at http://127\.0\.0\.1:1 does not answer: "):
        Preview("http://127.0.0.1:1/").write(tmp_path)
    command = [sys.executable, "-m", "headrace_monitoring.dashboards", "preview", str(tmp_path)]
    done = subprocess.run([*command, "--prometheus", "http://127.0.0.1:1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("the Prometheus at http://127.0.0.1:1 does not answer")


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (0.25, "s", "250 ms"),
        (0, "s", "0 s"),
        (0.00002, "s", "20 µs"),
        (90, "s", "90 s"),
        (7000, "s", "117 min"),
        (9000, "s", "2.5 h"),
        (0.987, "percentunit", "98.7%"),
        (3 * 2**20, "bytes", "3 MiB"),
        (12, "bytes", "12 B"),
        (1500, "none", "1500"),
        (12345, "none", "12.3K"),
        (2.5e6, "suffix: tokens/s", "2.5M tokens/s"),
        (0.5, "reqps", "0.5 req/s"),
    ],
)
def test_values_are_written_in_their_unit(value: float, unit: str, written: str) -> None:
    assert number(value, unit) == written


def test_a_long_title_is_cut_where_its_panel_ends() -> None:
    assert clipped("First token", 200) == "First token"
    assert clipped("First token", 40) == "Firs…"


def graph(**defaults: Any) -> dict[str, Any]:
    return {"type": "timeseries", "title": "t", "fieldConfig": {"defaults": {"unit": "percentunit", **defaults}}}


def test_a_line_is_broken_where_nothing_was_measured() -> None:
    points = [(float(at), 0.5) for at in (0, 1, 2, 7, 8, 9)]
    drawn = panel(graph(), [Series("a", points)], Box(0, 0, 400, 300), Span(0, 10))
    assert drawn.count("<polyline") == 2


def test_a_share_has_a_scale_up_to_all_of_it() -> None:
    series = [Series("a", [(0.0, 0.004), (1.0, 0.005)])]
    assert ">100%<" in panel(graph(max=1), series, Box(0, 0, 400, 300), Span(0, 10))
    assert ">100%<" not in panel(graph(), series, Box(0, 0, 400, 300), Span(0, 10))
