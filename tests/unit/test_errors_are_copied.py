"""Every exception of every package survives a copy and pickle, as Celery and process pools make them."""

import ast
import copy
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_PACKAGES = sorted(path.parent for path in _ROOT.glob("*/headrace_*/__init__.py"))
_VALUES = {
    "int": 3,
    "float": 2.5,
    "float | None": 2.5,
    "bool": True,
    "str | None": "x",
    "BaseException": ValueError("x"),
    "Any": None,
}
"""Arguments by annotation; all other parameters get a text or a list of one."""


def _classes(package: Path) -> Iterator[type[BaseException]]:
    """Yield the exceptions that the modules of a package define. Only modules with one are imported."""
    for path in sorted(package.rglob("*.py")):
        if "vllm" in package.name:  # its classes need vLLM
            return
        names = [
            each.name
            for each in ast.parse(path.read_text()).body
            if isinstance(each, ast.ClassDef)
            and any("Error" in base or "Exception" in base for base in map(ast.unparse, each.bases))
        ]
        if names:
            module = importlib.import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
            yield from (getattr(module, name) for name in names)


def _made(kind: type[BaseException]) -> BaseException:
    if not inspect.isfunction(kind.__init__):  # that of Exception
        return kind("x")
    args: list[Any] = []
    options: dict[str, Any] = {}
    for each in [*inspect.signature(kind.__init__).parameters.values()][1:]:
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            args += ["x"] * (each.kind is each.VAR_POSITIONAL)
        else:
            text = each.annotation if isinstance(each.annotation, str) else inspect.formatannotation(each.annotation)
            value = _VALUES.get(text, ["x"] if "Sequence" in text or "Iterable" in text or "tuple" in text else "x")
            if each.kind is each.KEYWORD_ONLY:
                options[each.name] = {} if "Mapping" in text else value
            else:
                args.append(value)
    return kind(*args, **options)


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
@pytest.mark.parametrize("package", _PACKAGES, ids=lambda path: path.name)
def test_a_copy_of_an_error_has_its_type_its_message_and_its_fields(
    package: Path, copied: Callable[[Any], Any]
) -> None:
    for kind in _classes(package):
        error = _made(kind)
        same = copied(error)
        assert (type(same), str(same), same.args) == (kind, str(error), error.args)
        assert repr(vars(same)) == repr(vars(error)), kind
