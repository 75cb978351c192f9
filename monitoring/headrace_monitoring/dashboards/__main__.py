"""`python -m headrace_monitoring.dashboards`: write the JSON, or draw a preview from a running Prometheus."""

import argparse
import sys
from pathlib import Path

from headrace_monitoring.dashboards import FOLDER, write
from headrace_monitoring.dashboards.preview import Preview
from headrace_monitoring.errors import HeadraceMonitoringError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace_monitoring.dashboards", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="write | preview")
    writing = commands.add_parser("write", help="write the JSON that Grafana reads (what happens without a command)")
    writing.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    drawing = commands.add_parser("preview", help="draw each dashboard as SVG")
    drawing.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    drawing.add_argument("--minutes", type=float, default=15.0, help="how far back (default: 15)")
    drawing.add_argument("--rate-interval", default="30s", help="four scrape intervals at least (default: 30s)")
    drawing.add_argument("folder", type=Path, help="where the pictures go")
    given = parser.parse_args()
    if given.command != "preview":
        write(getattr(given, "folder", FOLDER))
        return
    try:
        for path in Preview(given.prometheus, 60 * given.minutes, given.rate_interval).write(given.folder):
            print(path)  # noqa: T201
    except HeadraceMonitoringError as error:
        sys.exit(str(error))


main()
