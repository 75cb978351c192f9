"""For all tests: no example fails because a machine is slow, and no process of a run is left with a long file alone."""

from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")

TESTS: Final = Path(__file__).parent
PLACES: Final = {"chaos": 0, "unit": 2}
"""When the files of a folder begin, against those of all others: the longest first, and last those of seconds."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave files of one place in the order that pytest-randomly gave them."""
    items.sort(key=lambda item: PLACES.get(item.path.relative_to(TESTS).parts[0], 1))
