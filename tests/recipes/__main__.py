"""`make recipes`: the code of docs/recipes.md, on a real service: a table of what passed.

Each recipe's checks are a program. It runs in an environment that has the recipes' packages, and writes a line of JSON
for each check. Exit status 1 where a check failed.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from clients.outcomes import outcomes, print_table, progress
from headrace_cli.local.service import LocalService, RunningService
from headrace_engine.checkpoints import default_model

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parent.parent
PYTHON: Final = ROOT / ".venv-recipes" / "bin" / "python"
RECIPES: Final = ROOT / "examples" / "recipes"
PROGRAMS: Final = {path.stem.removeprefix("with_"): path for path in sorted(HERE.glob("with_*.py"))}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes", description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(PROGRAMS)} [default: all]")
    names = parser.parse_args().recipes or list(PROGRAMS)
    if unknown := set(names) - set(PROGRAMS):
        parser.error(f"there is no recipe {', '.join(sorted(unknown))}")
    os.environ["HEADRACE_CALLBACK_TASKS"] = "answers.*"  # as the recipe of Django says
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="headrace-recipes-") as folder:
        model, files = default_model.fetch(), Path(folder, "files")
        files.mkdir()
        with LocalService(str(model), progress, port=0, files=files).running() as service:
            for name in names:
                progress(f"checking {name}")
                work = Path(folder, name)
                work.mkdir()
                results += outcomes(name, command(name, service, model), work, environment(service, work))
    return print_table("recipe", results)


def command(name: str, service: RunningService, model: Path) -> list[str]:
    return [str(PYTHON), str(PROGRAMS[name]), f"{service.url}/v1", service.model, str(model), service.redis_url, "", ""]


def environment(service: RunningService, work: Path) -> dict[str, str]:
    """Return what the recipes read, and where Python finds them and the checks."""
    return {
        "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
        "HOME": str(work),
        "PYTHONPATH": os.pathsep.join(map(str, (RECIPES, HERE, HERE.parent / "clients"))),
        "HEADRACE_REDIS_URL": service.redis_url,
        "HEADRACE_URL": service.url,
        "MODEL": service.model,
    }


if __name__ == "__main__":
    sys.exit(main())
