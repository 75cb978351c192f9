"""What producers install and import: `pip install headrace` without an extra."""

import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from release_scripts import ROOT, load

MOST_BYTES = 30_000_000
"""Of all files of the packages, without compiled bytecode, which pip adds."""
LARGEST_KERNELS = 3_000_000
"""Bytes of the precompiled kernels of one architecture."""
OF_WORKERS_AND_GATEWAYS = {
    *("torch", "transformers", "tokenizers", "numpy", "llguidance", "prometheus_client", "structlog", "rich"),
    *("starlette", "uvicorn", "msgspec", "pydantic"),
    *("headrace_engine", "headrace_workers", "headrace_gateway", "headrace_cli", "headrace_monitoring"),
}
OF_RARE_CALLS = {
    f"headrace_broker.{name}"
    for name in (
        *("client.pooling_calls", "client.decision_calls", "pooling_results", "usage.ledger", "usage.budgets"),
        *("queue.dead_letters", "queue.levels", "queue.request_search"),
    )
}


def imported(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after a statement, outside the standard library."""
    code = f"import sys; before = {{*sys.modules}}; {statement}; print(*({{*sys.modules}} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}


def roots(modules: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file() and "__pycache__" not in path.parts)


def test_the_base_install_takes_at_most_30_mb() -> None:
    packages = load("components").installed_closure(())
    theirs = {name: size_of(Path(str(f.locate())) for f in distribution(name).files or ()) for name in packages}
    ours = size_of(path for folder in ROOT.glob("*/headrace_*") for path in folder.rglob("*"))
    assert {"celery", "redis"} <= theirs.keys()
    assert min(ours, *theirs.values()) > 0
    assert sum(theirs.values()) + ours + LARGEST_KERNELS <= MOST_BYTES, theirs


def test_an_import_of_the_package_imports_no_other_package() -> None:
    assert imported("import headrace_broker") == {"headrace_broker"}


def test_a_client_imports_redis_and_no_celery_before_its_first_request() -> None:
    clients = "Client('redis://127.0.0.1:1/0', model='m'); AsyncClient('redis://127.0.0.1:1/0', model='m')"
    modules = imported(f"from headrace_broker import Client, AsyncClient; {clients}")
    assert "redis" in roots(modules)
    assert not (OF_WORKERS_AND_GATEWAYS | {"celery", "kombu"}) & roots(modules)
    assert not OF_RARE_CALLS & modules


def test_what_a_first_request_imports_is_not_of_workers() -> None:
    modules = imported("import headrace_broker.client.message_sender")
    assert {"celery", "redis"} <= roots(modules)
    assert not OF_WORKERS_AND_GATEWAYS & roots(modules)
    assert not {"headrace_broker.queue.leases", "headrace_broker.queue.transport", "kombu.transport.redis"} & modules


def test_every_public_name_of_the_package_can_be_imported() -> None:
    import headrace_broker

    assert [name for name in headrace_broker.__all__ if not hasattr(headrace_broker, name)] == []
