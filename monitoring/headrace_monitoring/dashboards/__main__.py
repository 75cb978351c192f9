"""`python -m headrace_monitoring.dashboards [FOLDER]`: write the dashboards as JSON."""

import argparse
from pathlib import Path

from headrace_monitoring.dashboards import FOLDER, write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace_monitoring.dashboards", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    write(parser.parse_args().folder)


main()
