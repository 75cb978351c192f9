"""For all tests: no example fails because a machine is slow, and no process of a run is left with a long file alone."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import structlog
from hypothesis import HealthCheck, settings

from selection import SHARES, changed_files, left_out, of_a_short_run

settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")

TESTS: Final = Path(__file__).parent
PLACES: Final = {"chaos": 0, "unit": 2}
"""When the files of a folder begin, against those of all others: the longest first, and last those of seconds."""
NUM_SLOWEST: Final = 20
SHARED: Final = {
    name: re.compile(rf"^(async )?def test_\w+\([^)]*\b{fixture}\b", re.MULTILINE)
    for name, fixture in {"gateway": "gateway: RunningGateway", "worker": "service: Service"}.items()
}
"""How a test file names a service that takes seconds to start and lasts as long as its process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--short", action="store_true", help=f"run one in {SHARES} of the rotated tests (selection.py)")


@cache
def scope_of(file: str) -> str:
    """Return the name of the service that the tests of a file share, or the file."""
    text = TESTS.parent.joinpath(file).read_text(encoding="utf-8")
    has_its_own = "def service(" in text
    return next((name for name, shared in SHARED.items() if not has_its_own and shared.search(text)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one process, and so all files that share a service."""
    from xdist.scheduler import LoadFileScheduling  # not in every environment

    class FewServices(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(super()._split_scope(nodeid))

    return FewServices(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def _structlog_to_logging() -> None:
    """Let `caplog` see events with their fields, whatever an earlier test has configured."""
    structlog.configure(
        processors=[structlog.processors.KeyValueRenderer(key_order=["event"], repr_native_str=False)],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave files of one place in the order that pytest-randomly gave them."""
    everything = None  # then every test is kept, and marks are checked
    changed = of_a_short_run(changed_files()) if config.option.short else everything
    without = left_out(items, changed, config.getoption("randomly_seed", 0))
    config.hook.pytest_deselected(items=list(without))
    items[:] = [item for item in items if item not in without]
    items.sort(key=lambda item: PLACES.get(item.path.relative_to(TESTS).parts[0], 1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the slowest files of a short run, and how to repeat its selection."""
    if not config.option.short:
        return
    seconds: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"slowest {NUM_SLOWEST} files")
    for name, duration in seconds.most_common(NUM_SLOWEST):
        terminalreporter.write_line(f"{duration:8.2f}s {name}")
    seed = config.getoption("randomly_seed", 0)
    terminalreporter.write_line(f"A short run with --randomly-seed={seed}; `make test-all` runs the rotated tests too.")
