"""Check the layout of the packages: `python docs/package_layout.py` prints files per folder and names used twice.

The root of a package has at most fifteen files, and no two files or public classes have the same name. Intended
exceptions are listed below with the reason. The exit status is 1 if a rule is broken, or if a listed name is used only
once. With `--check` only these problems are printed.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

ROOT: Final = Path(__file__).resolve().parents[1]
MAX_ROOT_FILES: Final = 15

Explained: TypeAlias = Mapping[str, tuple[str, ...]]

SAME_CLASSES: Final[Explained] = {
    "how the engine renders a chat, and how the gateway writes its answer": ("ChatOptions",),
}
"""Reasons, and the names that several public classes may share for each."""
SAME_FILES: Final[Explained] = {
    "each package has its own": ("app", "errors", "keys", "settings", "tracing"),
    "each API of the gateway has its own": ("endpoints", "fields", "messages", "stream"),
    "each kind of device has its own": ("devices", "loader", "runner", "sampling", "triton_kernels"),
    "the wire declares it, and another package handles it": ("chat", "request"),
    "a plain word for two things, which their folders tell apart": (
        "admission",
        "events",
        "generation",
        "metrics",
        "outputs",
        "process",
        "registry",
    ),
}
"""Reasons, and the names (without `.py`) that several files may share for each."""
NAMED_BY_SUBJECT: Final = (
    "cli/headrace_cli/commands/",  # by the command
    "cli/headrace_cli/local/",  # by the process that is started
    "engine/headrace_engine/conformance/",  # by what is checked
    "engine/headrace_engine_vllm/",  # by the part of Headrace's engine that the file replaces
    "monitoring/headrace_monitoring/dashboards/",  # by the dashboard
)
"""Folders whose files are named by their subject, such as a command; other folders may have a file of that name."""


def packages(root: Path = ROOT) -> Iterator[Path]:
    """Find the folders of the packages."""
    return (path.parent for path in sorted(root.glob("*/headrace_*/__init__.py")))


def modules(root: Path = ROOT) -> Iterator[Path]:
    """Find the modules of all packages."""
    return (path for package in packages(root) for path in sorted(package.rglob("*.py")))


def files_per_folder(root: Path = ROOT) -> Counter[str]:
    """Count the modules of each folder that contains modules."""
    return Counter(path.parent.relative_to(root).as_posix() for path in modules(root))


def same_classes(root: Path = ROOT) -> dict[str, list[str]]:
    """Find class names that several public classes have, and the files that define them."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in modules(root):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(root).as_posix())
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def same_files(root: Path = ROOT) -> dict[str, list[str]]:
    """Find names that several modules have, and the paths of these modules."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in modules(root):
        name = path.relative_to(root).as_posix()
        if not path.stem.startswith("__") and not name.startswith(NAMED_BY_SUBJECT):
            found[path.stem].append(name)
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def problems(root: Path = ROOT, classes: Explained = SAME_CLASSES, files: Explained = SAME_FILES) -> Iterator[str]:
    """Give a sentence for each broken rule.

    Args:
        classes, files: reasons, and the names that several classes or files may share for each.
    """
    counts = files_per_folder(root)
    for package in packages(root):
        name = package.relative_to(root).as_posix()
        if counts[name] > MAX_ROOT_FILES:
            yield f"{name} must have at most {MAX_ROOT_FILES} files, got {counts[name]}: move some into a folder"
    yield from _unexplained("class", same_classes(root), classes)
    yield from _unexplained("file", same_files(root), files)


def _unexplained(kind: str, found: Mapping[str, list[str]], explained: Explained) -> Iterator[str]:
    known = {name for names in explained.values() for name in names}
    for name, paths in found.items():
        if name not in known:
            found_in = ", ".join(paths)
            yield (
                f"{name} must be the name of one {kind}, got {found_in}: rename one, or explain it in "
                "docs/package_layout.py"
            )
    for name in sorted(known - found.keys()):
        yield f"{name} is the name of one {kind} only: delete it from docs/package_layout.py"


def main() -> int:
    if "--check" not in sys.argv[1:]:
        for folder, count in files_per_folder().items():
            sys.stdout.write(f"{count:4} {folder}\n")
        for kind, found in (("class", same_classes()), ("file", same_files())):
            for name, paths in found.items():
                sys.stdout.write(f"{kind} {name}: {', '.join(paths)}\n")
    broken = list(problems())
    sys.stderr.writelines(f"{problem}\n" for problem in broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
