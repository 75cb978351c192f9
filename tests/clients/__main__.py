"""`make clients`: libraries and tools that call the gateway or the queue, on a real service: a table of what passed.

Each client runs in an environment of its own, as a program that writes a line of JSON for each check.
Exit status 1 where a check failed.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from clients.model import save_model_with_tools
from clients.outcomes import outcomes, print_table, progress
from clients.pooling_models import EMBEDDER, RERANKER, save_pooling_models
from headrace_cli.local.process import LocalWorker
from headrace_cli.local.service import LocalService, RunningService

HERE: Final = Path(__file__).parent
ENVIRONMENT: Final = HERE.parent.parent / ".venv-clients"
NODE: Final = ENVIRONMENT / "node"
PROGRAMS: Final = {path.stem.removeprefix("with_"): path for path in sorted(HERE.glob("with_*"))}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m clients", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(PROGRAMS)} [default: all]")
    names = parser.parse_args().clients or list(PROGRAMS)
    if unknown := set(names) - set(PROGRAMS):
        parser.error(f"there is no client {', '.join(sorted(unknown))}")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="headrace-clients-") as folder:
        model = save_model_with_tools(Path(folder))
        with LocalService(str(model), progress, port=0).running() as service, pooling_workers(service, Path(folder)):
            for name in names:
                progress(f"checking {name}")
                results += checked(name, service, model)
    return print_table("client", results)


@contextmanager
def pooling_workers(service: RunningService, folder: Path) -> Iterator[None]:
    """Run a worker of each pooling model."""
    with ExitStack() as stack:
        for path in save_pooling_models(folder):
            log = folder / f"{path.name}.log"
            worker = LocalWorker(
                model=str(path), redis_url=service.redis_url, log=log, served_model_name=path.name, grace_seconds=5
            )
            stack.enter_context(worker).wait_ready()
        yield


def checked(name: str, service: RunningService, model: Path) -> list[dict[str, Any]]:
    """What the client's program says of each check; one more that failed where the program itself did."""
    program = PROGRAMS[name]
    if program.suffix == ".mjs":  # modules are looked for beside the program
        shutil.copy(HERE / "checks.mjs", NODE)
        command, folder = ["node", shutil.copy(program, NODE)], NODE
    else:
        command, folder = [str(ENVIRONMENT / "bin" / "python"), str(program)], HERE
    command += [f"{service.url}/v1", service.model, str(model), service.redis_url, EMBEDDER, RERANKER]
    return outcomes(name, command, folder, os.environ)


if __name__ == "__main__":
    sys.exit(main())
