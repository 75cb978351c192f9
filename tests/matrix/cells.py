"""The cells of the matrix: what is exchanged in each, and the tests that run with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
OLDEST_TORCH: Final = "2.11.0"
"""The oldest that pyproject.toml allows."""
CI_TORCH: Final = "2.13.0"
"""The one that constraints.txt names."""
PRODUCERS: Final = ("5.5.3", "5.6.3", "5.7.0")
"""Releases of Celery. Each brings the kombu that it asks for."""

QUEUE_TESTS: Final = (
    "tests/service/broker/test_leases.py",
    "tests/service/broker/test_streams.py",
    "tests/service/broker/test_client.py",
    "tests/service/workers/test_plain_celery.py",
)
ENGINE_TESTS: Final = ("tests/engine/test_llm.py", "tests/engine/test_parity.py")
SERVER_TESTS: Final = (
    *QUEUE_TESTS,
    "tests/service/broker/test_wake_ups.py",
    "tests/service/operations/test_redis_users.py",
    "tests/service/test_redis_restart.py",
)
PRODUCER_TESTS: Final = ("tests/service/workers/test_plain_celery.py",)


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table."""

    what: str
    """Such as `Python`."""
    version: str
    tests: tuple[str, ...]
    packages: tuple[str, ...] = ()
    """For an environment of its own. `.` is this checkout. Without packages, the tests run in this environment."""
    python: str = ""
    """The version of the interpreter of that environment; empty: this one's."""
    server: str = ""
    """The program of the Redis server for the tests; empty: the default one."""
    is_producer: bool = False
    """Only the producer runs in the environment. Tests and worker run in this one."""

    @property
    def name(self) -> str:
        return f"{self.what} {self.version}".lower().replace(" ", "-")


def all_cells(servers: dict[str, str]) -> list[Cell]:
    """Return all cells. `servers` are the programs of Redis servers by their names."""
    tests = (*QUEUE_TESTS, *ENGINE_TESTS)
    own = ".[dev]"
    return [
        *(Cell("Python", each, tests, (own, f"torch=={CI_TORCH}"), python=each) for each in PYTHONS),
        Cell("torch", OLDEST_TORCH, ENGINE_TESTS, (own, f"torch=={OLDEST_TORCH}")),
        Cell("torch", CI_TORCH, ENGINE_TESTS),
        Cell("torch", "newest", ENGINE_TESTS, (own,)),  # what pip installs for a user
        *(Cell(*name.rsplit(" ", 1), SERVER_TESTS, server=program) for name, program in servers.items()),
        *(
            Cell("Celery producer", each, PRODUCER_TESTS, (f"celery[redis]=={each}", "msgpack"), is_producer=True)
            for each in PRODUCERS
        ),
    ]
