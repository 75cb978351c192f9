"""The scripts of release/, which are in no package, as modules."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load(name: str) -> ModuleType:
    """Import release/<name>.py, and the scripts that it imports."""
    sys.path.insert(0, str(ROOT / "release"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)
