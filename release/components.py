"""What an installation contains: an SBOM in CycloneDX's format, a report of licences, and an audit.

They cover Headrace with the extras that serve, and what these need, in the versions of constraints.txt.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from importlib.metadata import distribution, metadata
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement

EXTRAS: Final = ("worker", "gateway", "embedded", "tracing")


def installed_closure(extras: Iterable[str] = EXTRAS) -> dict[str, str]:
    """Return the versions of all packages that Headrace with these extras needs, by normalised name, without itself."""
    found: dict[str, str] = {}
    waiting = [("headrace", frozenset(extras))]
    visited = set(waiting)
    while waiting:
        name, chosen = waiting.pop()
        package = distribution(name)
        found[_normalised(name)] = package.version
        for line in package.requires or ():
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *chosen)):
                step = (need.name, frozenset(need.extras))
                if step not in visited:
                    visited.add(step)
                    waiting.append(step)
    del found["headrace"]
    return dict(sorted(found.items()))


def write_sbom(tool: Path, python: Path, root: Path, target: Path, packages: dict[str, str]) -> list[dict[str, Any]]:
    """Write the SBOM of an environment, reduced to these packages. Returns its components.

    Args:
        tool: the program cyclonedx-py.
        python: the interpreter of the environment.
        root: the folder of pyproject.toml.
    """
    command = [tool, "environment", "--pyproject", root / "pyproject.toml", "--output-reproducible", "--of", "JSON"]
    done = subprocess.run([*map(str, command), str(python)], capture_output=True, text=True, check=True)
    bom: dict[str, Any] = json.loads(done.stdout)
    components = [each for each in bom["components"] if _normalised(each["name"]) in packages]
    missing = packages.keys() - {_normalised(each["name"]) for each in components}
    if missing:
        raise ValueError(f"the SBOM lacks {', '.join(sorted(missing))}")
    for each in components:
        stated = str(metadata(each["name"]).json.get("license", "")).partition("\n")[0]
        if stated and "licenses" not in each:  # the tool reads no words such as "Apache 2.0 License"
            each["licenses"] = [{"license": {"name": stated}}]
    known = {each["bom-ref"] for each in components} | {bom["metadata"]["component"]["bom-ref"]}
    bom["components"] = components
    bom["dependencies"] = [
        {**each, "dependsOn": [ref for ref in each.get("dependsOn", ()) if ref in known]}
        for each in bom.get("dependencies", ())
        if each["ref"] in known
    ]
    target.write_text(json.dumps(bom, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return components


def write_licences(components: list[dict[str, Any]], target: Path) -> list[str]:
    """Write a table of the licences. Returns the packages whose licence is unknown."""
    lines = ["| package | version | licence |", "|---|---|---|"]
    unknown = []
    for each in sorted(components, key=lambda component: str(component["name"]).lower()):
        names = _licences(each)
        if not names:
            unknown.append(str(each["name"]))
        lines.append(f"| {each['name']} | {each['version']} | {'; '.join(names) or 'unknown'} |")
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return unknown


def _licences(component: dict[str, Any]) -> list[str]:
    """Return the licences of a component: expressions and SPDX ids if it has any, otherwise names."""
    exact, named = [], []
    for each in component.get("licenses", ()):
        licence = each.get("license", {})
        if "expression" in each or "id" in licence:
            exact.append(each.get("expression") or licence["id"])
        else:
            named.append(
                str(licence.get("name", "")).partition("\n")[0][:80].removeprefix("License :: OSI Approved :: ")
            )
    return list(dict.fromkeys(exact or [name for name in named if name]))


def audit(tool: Path, packages: dict[str, str], target: Path) -> str:
    """Ask PyPI's database for known faults of these packages. Returns the result in a few words.

    Without a network the result says so: nothing was audited then.
    """
    pins = target.with_suffix(".txt")
    pins.write_text("".join(f"{name}=={_public(version)}\n" for name, version in packages.items()), encoding="utf-8")
    command = [tool, "--requirement", pins, "--no-deps", "--disable-pip", "--format", "json", "--output", target]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    pins.unlink()
    if not target.is_file():
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return f"not audited: PyPI's database was not reached ({reason[:200]})"
    found = json.loads(target.read_text(encoding="utf-8"))["dependencies"]
    skipped = [each["name"] for each in found if "skip_reason" in each]
    faults = [f"{each['name']} {fault['id']}" for each in found for fault in each.get("vulns", ())]
    if len(skipped) == len(found):  # as behind a mirror, which has no database
        return f"not audited: the package index knows no faults ({found[0]['skip_reason'] if found else 'no packages'})"
    said = f"{len(found) - len(skipped)} packages audited, {len(faults)} known faults"
    return f"{said}{': ' if faults else ''}{', '.join(faults)}" + (
        f"; skipped: {', '.join(skipped)}" if skipped else ""
    )


def _public(version: str) -> str:
    """Return a version without its local part, such as +cpu, which PyPI does not know."""
    return version.partition("+")[0]


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
