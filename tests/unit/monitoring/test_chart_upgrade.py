"""A Helm upgrade from an earlier version of the chart, as far as it can be checked without a cluster."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from service.earlier_code import extract
from unit.monitoring.test_deployment_files import CHART, IN_A_SHARED_CLUSTER, ROOT, VALUES, helm

pytestmark = pytest.mark.rotated("deploy", "monitoring")

EARLIER: Final = "e86c438f"
"""The last commit before the wire format had a number, as in the Makefile."""

FIXED: Final[dict[str, tuple[str, ...]]] = {
    "ConfigMap": ("immutable",),
    "Deployment": ("spec.selector",),
    "HorizontalPodAutoscaler": (),
    "NetworkPolicy": (),
    "PodDisruptionBudget": (),
    "PodMonitor": (),
    "PrometheusRule": (),
    "Role": (),
    "RoleBinding": ("roleRef",),
    "ScaledObject": (),
    "Secret": ("immutable", "type"),
    "Service": ("spec.clusterIP", "spec.clusterIPs", "spec.ipFamilies"),
    "ServiceAccount": (),
}
"""What Kubernetes refuses to change in an object, by kind."""

CASES: Final[dict[str, dict[str, Any]]] = {
    "keda": {},
    "hpa in a shared cluster": {
        **IN_A_SHARED_CLUSTER,
        "worker": {**IN_A_SHARED_CLUSTER["worker"], "podDeletionCost": True},
        "autoscaling": {"kind": "hpa", "minReplicas": 1},
    },
}


@pytest.fixture(scope="module")
def earlier_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    if not extract(EARLIER, folder, ("deploy/helm", "monitoring")):
        pytest.skip(f"the history of git has no commit {EARLIER}")
    return folder / CHART.relative_to(ROOT)


@pytest.fixture(scope="module")
def reused_chart(earlier_chart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return this chart with the defaults of the earlier one, which `helm upgrade --reuse-values` keeps."""
    chart = tmp_path_factory.mktemp("reused") / "headrace"
    shutil.copytree(CHART, chart)
    shutil.copy(earlier_chart / "values.yaml", chart)
    return chart


def objects(chart: Path, folder: Path, changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Render a chart. Return its objects by kind and name."""
    values = folder / "values.yaml"
    values.write_text(yaml.safe_dump({**VALUES, **changes}), encoding="utf-8")
    command = [helm(), "template", "demo", str(chart), "--values", str(values)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = [each for each in yaml.safe_load_all(done.stdout) if each]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in found}


def fixed(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that must stay, and None for those that are absent.

    Raises:
        KeyError: FIXED does not have the kind.
    """
    fields = {}
    for path in FIXED[found["kind"]]:
        value: Any = found
        for key in path.split("."):
            value = (value or {}).get(key)
        fields[path] = value
    return fields


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_an_upgrade_keeps_every_object_and_the_fields_that_kubernetes_refuses_to_change(
    earlier_chart: Path, reused_chart: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    before = objects(earlier_chart, tmp_path, changes)
    after = objects(CHART, tmp_path, changes)
    assert before.keys() <= after.keys()
    assert {name: fixed(after[name]) for name in before} == {name: fixed(each) for name, each in before.items()}
    for found in (before, after):
        for deployment in (each["spec"] for each in found.values() if each["kind"] == "Deployment"):
            wanted = deployment["selector"]["matchLabels"]
            assert wanted.items() <= deployment["template"]["metadata"]["labels"].items()
    assert objects(reused_chart, tmp_path, changes) == after
