"""The Helm chart, as far as it can be checked without a cluster."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from headrace_gateway.settings import GATEWAY_PREFIX, GatewaySettings
from headrace_monitoring import dashboards
from headrace_wire.environment import variable_of
from headrace_wire.option import options_of
from headrace_workers.settings import SETTINGS
from unit.monitoring import custom_resources

pytestmark = pytest.mark.rotated(
    "deploy",
    "monitoring",
    "docs/engines.md",
    "wire/headrace_wire/option.py",
    "broker/headrace_broker/settings.py",
    "gateway/headrace_gateway/settings.py",
    "workers/headrace_workers/settings.py",
)

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "headrace"
VALUES = {
    "model": {"servedName": "tiny", "volume": {"persistentVolumeClaim": {"claimName": "m", "readOnly": True}}},
    "redis": {"workerUrl": "redis://worker:secret@redis:6379/0"},
    "worker": {"tenants": ["acme", "other-inc"]},
    "autoscaling": {"kind": "keda", "prometheusAddress": "http://prometheus:9090"},
    "gateway": {
        "enabled": True,
        "keysSecret": "gateway-keys",
        "webhooksSecret": "hooks",
        "filesClaim": "uploads",
        "autoscaling": {"enabled": True},
    },
    "monitoring": {"podMonitor": True, "prometheusRule": True, "dashboards": True},
}
NEURON_WORKER = {
    "device": "neuron",
    "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "64Gi", "aws.amazon.com/neuron": 1}},
    "startupSeconds": 7200,
    "compileCache": {"persistentVolumeClaim": {"claimName": "graphs"}},
    "extraEnv": [{"name": "HEADRACE_KV_CACHE_MEMORY", "value": "8GiB"}],
    "nodeSelector": {"node.kubernetes.io/instance-type": "trn2.3xlarge"},
    "tolerations": [{"key": "aws.amazon.com/neuron", "operator": "Exists", "effect": "NoSchedule"}],
}
VLLM_WORKER = {
    "image": {"repository": "headrace-worker-vllm", "tag": "1"},
    "engine": "vllm",
    "engineArgs": {"gpu_memory_utilization": 0.85, "distributed_executor_backend": "mp"},
    "tensorParallelSize": 2,
    "gpus": 2,
    "sharedMemory": "8Gi",
    "compileCache": {"persistentVolumeClaim": {"claimName": "graphs"}},
    "resources": {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "64Gi"}},
}
_SPREAD = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
_SCRAPERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
_POD = {"podAnnotations": {"team": "ml"}, "priorityClassName": "high", "nodeSelector": {"pool": "cpu"}}
IN_A_SHARED_CLUSTER: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "worker": {
        **_POD,
        "topologySpreadConstraints": [_SPREAD],
        "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "kernelCache": {"persistentVolumeClaim": {"claimName": "kernels"}},
    },
    "gateway": {"enabled": True, "keysSecret": "keys", "topologySpreadConstraints": [_SPREAD], **_POD},
    "exporter": _POD,
    "networkPolicy": {"enabled": True, "scrapeFrom": _SCRAPERS, "redisPorts": [6379, 26379]},
}


def helm() -> str:
    program = shutil.which("helm", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if program is None:
        pytest.skip("helm is not installed (make ops-tools)")
    return program


def render(tmp_path: Path, changes: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({**VALUES, **changes}), encoding="utf-8")
    command = [helm(), "template", "demo", str(CHART), "--values", str(values)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def template(tmp_path: Path, **changes: Any) -> list[dict[str, Any]]:
    done = render(tmp_path, changes)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def refused(tmp_path: Path, **changes: Any) -> str:
    """What helm says of values that are wrong."""
    done = render(tmp_path, changes)
    assert done.returncode != 0
    return done.stderr


def worker_pod(tmp_path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The pod of a worker with these values."""
    (pod,) = [
        found["spec"]["template"]["spec"]
        for found in template(tmp_path, worker=values)
        if found["kind"] == "Deployment" and found["metadata"]["name"] == "demo-worker"
    ]
    return pod


@pytest.fixture
def manifests(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """By kind and name."""
    return {f"{found['kind']}/{found['metadata']['name']}": found for found in template(tmp_path)}


def test_the_chart_renders_everything_that_it_promises(manifests: dict[str, dict[str, Any]]) -> None:
    assert set(manifests) == {
        "Secret/demo-redis",
        "Deployment/demo-worker",
        "Deployment/demo-exporter",
        "Deployment/demo-gateway",
        "Service/demo-gateway",
        "HorizontalPodAutoscaler/demo-gateway",
        "PodDisruptionBudget/demo-gateway",
        "PodDisruptionBudget/demo-worker",
        "ScaledObject/demo-worker",
        "PodMonitor/demo-worker",
        "PodMonitor/demo-exporter",
        "PodMonitor/demo-gateway",
        "PrometheusRule/demo",
        "ConfigMap/demo-dashboards",
    }


def test_the_chart_gives_each_process_the_servers_of_the_queues(tmp_path: Path) -> None:
    urls = {f"{role}QueueUrls": f"tiny=redis://{role}:secret@other:6379/0" for role in ("worker", "gateway")}
    found = {
        f"{each['kind']}/{each['metadata']['name']}": each for each in template(tmp_path, redis=VALUES["redis"] | urls)
    }
    secret = found["Secret/demo-redis"]["stringData"]
    for role, user in {"worker": "worker", "gateway": "gateway", "exporter": "worker"}.items():
        (container,) = found[f"Deployment/demo-{role}"]["spec"]["template"]["spec"]["containers"]
        (variable,) = [each for each in container["env"] if each["name"] == "HEADRACE_QUEUE_URLS"]
        source = variable["valueFrom"]["secretKeyRef"]
        assert source["optional"], "a Secret of earlier values has no such key"
        assert secret[source["key"]] == f"tiny=redis://{user}:secret@other:6379/0"
    plain = next(each for each in template(tmp_path) if each["kind"] == "Secret")["stringData"]
    assert sorted(plain) == ["exporter-url", "gateway-url", "worker-url"]


def test_what_the_chart_renders_is_valid_kubernetes(tmp_path: Path) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed (make ops-tools)")
    import kubernetes_validate

    hpa = template(tmp_path, autoscaling={"kind": "hpa", "minReplicas": 1}, monitoring={})
    others = [found for worker in (NEURON_WORKER, VLLM_WORKER) for found in template(tmp_path, worker=worker)]
    others += template(tmp_path, **IN_A_SHARED_CLUSTER) + template(tmp_path, worker={"podDeletionCost": True})
    checked = []
    for manifest in [*template(tmp_path), *hpa, *others]:
        if manifest["kind"] not in custom_resources.SCHEMAS:
            kubernetes_validate.validate(manifest, "1.37", strict=True)
            checked.append(manifest["kind"])
    kinds = {"Deployment", "Service", "Secret", "ConfigMap", "PodDisruptionBudget", "HorizontalPodAutoscaler"}
    kinds |= {"NetworkPolicy", "ServiceAccount", "Role", "RoleBinding"}
    assert kinds == set(checked)


def metrics_of(tmp_path: Path, **autoscaling: Any) -> dict[str, Any]:
    """Return what the worker's scaler measures."""
    (scaler,) = [
        found
        for found in template(tmp_path, autoscaling={**VALUES["autoscaling"], **autoscaling})
        if found["kind"] in ("ScaledObject", "HorizontalPodAutoscaler") and found["metadata"]["name"] == "demo-worker"
    ]
    if scaler["kind"] == "ScaledObject":
        custom_resources.validate(scaler)
        return dict(scaler["spec"]["triggers"][0]["metadata"])
    external = scaler["spec"]["metrics"][0]["external"]
    return {"name": external["metric"]["name"], **external["target"]}


MESSAGES = 'sum(max by (queue, state) (headrace_queue_messages{model="tiny",state=~"ready|unacked"}))'


def test_keda_scales_by_the_signal_of_the_values(tmp_path: Path) -> None:
    by_messages = metrics_of(tmp_path)
    assert (by_messages["query"], by_messages["threshold"]) == (MESSAGES, "51")
    by_work = metrics_of(tmp_path, signal="work", targetSeconds=90)
    seconds = 'sum(max by (queue) (headrace_outstanding_worker_seconds{model="tiny"}))'
    assert (by_work["query"], by_work["threshold"]) == (f"{seconds} / 90 or {MESSAGES} / 51", "1")


def test_an_hpa_scales_by_the_signal_of_the_values(tmp_path: Path) -> None:
    found = {
        signal: metrics_of(tmp_path, kind="hpa", minReplicas=1, signal=signal, targetSeconds=90)
        for signal in ("messages", "work")
    }
    target = {"type": "AverageValue"}
    assert found["messages"] == {"name": "headrace_outstanding_messages", "averageValue": "51", **target}
    assert found["work"] == {"name": "headrace_workers_wanted", "averageValue": "1500m", **target}


@pytest.mark.parametrize("wrong", [{"signal": "tokens"}, {"targetSeconds": 0}, {"targetSeconds": "60"}])
def test_a_wrong_signal_or_target_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    assert "/autoscaling/" + next(iter(wrong)) in refused(tmp_path, autoscaling={**VALUES["autoscaling"], **wrong})


def test_the_custom_resources_have_the_fields_that_their_operators_know(
    manifests: dict[str, dict[str, Any]],
) -> None:
    found = [manifest for manifest in manifests.values() if manifest["kind"] in custom_resources.SCHEMAS]
    assert {manifest["kind"] for manifest in found} == set(custom_resources.SCHEMAS)
    for manifest in found:
        custom_resources.validate(manifest)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("PodMonitor/demo-worker", ("spec", "podMetricsEndpoint"), []),
        ("PodMonitor/demo-worker", ("spec", "podMetricsEndpoints", 0, "interval"), "15 s"),
        ("PodMonitor/demo-worker", ("spec", "podMetricsEndpoints", 0, "relabelings", 0, "target_label"), "job"),
        ("PrometheusRule/demo", ("spec", "groups", 1, "rules", 0, "severity"), "page"),
        ("PrometheusRule/demo", ("spec", "groups", 1, "rules", 0, "labels"), {"page": True}),
        ("ScaledObject/demo-worker", ("spec", "cooldownPeriodSeconds"), 300),
        ("ScaledObject/demo-worker", ("spec", "triggers", 0, "metadata", "threshold"), 51),
        ("ScaledObject/demo-worker", ("spec", "triggers", 0, "metadata", "ignoreNullValue"), "false"),
    ],
)
def test_a_field_that_an_operator_does_not_know_is_refused(
    manifests: dict[str, dict[str, Any]], name: str, path: tuple[Any, ...], value: Any
) -> None:
    changed: Any = manifests[name]
    for key in path[:-1]:
        changed = changed[key]
    changed[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        custom_resources.validate(manifests[name])


def test_a_neuron_worker_has_its_device_time_to_compile_and_a_place_for_what_it_compiled(tmp_path: Path) -> None:
    pod = worker_pod(tmp_path, NEURON_WORKER)
    (worker,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in worker["env"]}
    assert environment["HEADRACE_DEVICE"] == "neuron"
    assert worker["resources"]["limits"]["aws.amazon.com/neuron"] == 1
    assert worker["startupProbe"]["failureThreshold"] * worker["startupProbe"]["periodSeconds"] == 7200
    mounts = {mount["mountPath"]: mount["name"] for mount in worker["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    cache = volumes[mounts[environment["HEADRACE_COMPILE_CACHE_DIR"]]]
    assert cache["persistentVolumeClaim"] == {"claimName": "graphs"}
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]  # or it could not write there


def test_a_vllm_worker_has_its_image_options_gpus_and_shared_memory(tmp_path: Path) -> None:
    pod = worker_pod(tmp_path, VLLM_WORKER)
    (worker,) = pod["containers"]
    assert worker["image"] == "headrace-worker-vllm:1"
    environment = {entry["name"]: entry.get("value") for entry in worker["env"]}
    assert environment["HEADRACE_ENGINE"] == "vllm"
    assert json.loads(environment["HEADRACE_ENGINE_ARGS"]) == VLLM_WORKER["engineArgs"]
    assert environment["HEADRACE_TENSOR_PARALLEL_SIZE"] == "2"
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": 2, "memory": "64Gi"}
    mounts = {mount["mountPath"]: mount["name"] for mount in worker["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    cache = volumes[mounts[environment["VLLM_CACHE_ROOT"]]]
    assert cache["persistentVolumeClaim"] == {"claimName": "graphs"}
    assert "HEADRACE_COMPILE_CACHE_DIR" not in environment  # vLLM has no such option


def test_the_documented_command_for_vllm_gives_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^(helm install my-model (?:.*\\\n)*.*)$", page, re.MULTILINE)
    words = shlex.split(command.replace("helm install", "helm template").replace("\\\n", ""))
    done = subprocess.run([helm(), *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found = {f"{one['kind']}/{one['metadata']['name']}": one for one in yaml.safe_load_all(done.stdout) if one}
    pod = found["Deployment/my-model-worker"]["spec"]["template"]["spec"]
    environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert environment["HEADRACE_ENGINE"] == "vllm"
    assert environment["HEADRACE_TENSOR_PARALLEL_SIZE"] == "2"
    assert json.loads(environment["HEADRACE_ENGINE_ARGS"]) == {"gpu_memory_utilization": 0.85}
    assert {volume["name"] for volume in pod["volumes"]} == {"model", "tmp", "home", "shared-memory"}


def test_another_engines_worker_has_a_home_that_no_other_user_can_write_in(tmp_path: Path) -> None:
    pod = worker_pod(tmp_path, VLLM_WORKER)
    (worker,), (maker,) = pod["containers"], pod["initContainers"]
    environment = {entry["name"]: entry.get("value") for entry in worker["env"]}
    (home,) = [mount for mount in worker["volumeMounts"] if mount["mountPath"] == environment["HOME"]]
    (made,) = maker["volumeMounts"]
    assert home["name"] == made["name"]
    assert maker["command"] == ["mkdir", "-p", "-m", "700", f"{made['mountPath']}/{home['subPath']}"]
    assert maker["securityContext"] == worker["securityContext"]
    assert maker["image"] == worker["image"]  # no other one need be there


def test_a_worker_of_our_own_engine_has_nothing_of_another_one(manifests: dict[str, dict[str, Any]]) -> None:
    pod = manifests["Deployment/demo-worker"]["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in worker["env"]}
    assert environment["HEADRACE_ENGINE"] == "headrace"
    assert {"HEADRACE_ENGINE_PYTHON", "HEADRACE_ENGINE_ARGS", "VLLM_CACHE_ROOT", "HOME"}.isdisjoint(environment)
    assert "initContainers" not in pod
    assert {volume["name"] for volume in pod["volumes"]} == {"model", "tmp"}


def test_the_exporter_runs_in_the_gateways_image_which_has_no_torch(manifests: dict[str, dict[str, Any]]) -> None:
    (exporter,) = manifests["Deployment/demo-exporter"]["spec"]["template"]["spec"]["containers"]
    assert exporter["image"].split(":")[0] == "headrace-gateway"


def test_pods_of_a_shared_cluster_get_their_place_and_their_images(tmp_path: Path) -> None:
    found = {
        one["metadata"]["name"]: one["spec"]
        for one in template(tmp_path, **IN_A_SHARED_CLUSTER)
        if "Deploy" in one["kind"]
    }
    assert found["demo-worker"]["strategy"] == IN_A_SHARED_CLUSTER["worker"]["strategy"]
    assert found["demo-gateway"]["strategy"] == {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    for name, deployment in found.items():
        template_, pod = deployment["template"], deployment["template"]["spec"]
        assert template_["metadata"]["annotations"] == {"team": "ml"}
        assert (pod["priorityClassName"], pod["nodeSelector"]) == ("high", {"pool": "cpu"})
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        spread = pod.get("topologySpreadConstraints")
        selected = {"labelSelector": {"matchLabels": deployment["selector"]["matchLabels"]}}
        assert spread == (None if name == "demo-exporter" else [{**_SPREAD, **selected}])


def test_compiled_kernels_lie_in_a_private_folder_of_their_volume(tmp_path: Path) -> None:
    pod = worker_pod(tmp_path, IN_A_SHARED_CLUSTER["worker"])
    (worker,), (maker,) = pod["containers"], pod["initContainers"]
    environment = {entry["name"]: entry.get("value") for entry in worker["env"]}
    (cache,) = [mount for mount in worker["volumeMounts"] if mount["mountPath"] == environment["XDG_CACHE_HOME"]]
    (made,) = maker["volumeMounts"]
    assert maker["command"] == ["mkdir", "-p", "-m", "700", f"{made['mountPath']}/{cache['subPath']}"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == cache["name"] == made["name"]]
    assert volume["persistentVolumeClaim"] == {"claimName": "kernels"}


def test_a_network_policy_lets_a_pod_reach_names_and_redis_alone(tmp_path: Path) -> None:
    found = template(tmp_path, **IN_A_SHARED_CLUSTER)
    policies = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "NetworkPolicy"}
    pods = {one["metadata"]["name"]: one["spec"]["selector"] for one in found if one["kind"] == "Deployment"}
    assert policies.keys() == pods.keys()
    for name, policy in policies.items():
        assert policy["podSelector"] == pods[name]
        names, redis = policy["egress"]
        assert {port["port"] for port in names["ports"]} == {53}
        assert redis == {"ports": [{"port": 6379}, {"port": 26379}]}
        scraped, *others = policy["ingress"]
        assert scraped["from"] == _SCRAPERS
        assert others == ([{"ports": [{"port": 8000}]}] if name == "demo-gateway" else [])


@pytest.mark.parametrize(
    "worker",
    [VLLM_WORKER, NEURON_WORKER, {"podDeletionCost": True}, {}],
    ids=["vllm", "neuron", "deletion cost", "plain"],
)
def test_the_environment_of_a_pod_are_settings_of_a_worker(tmp_path: Path, worker: dict[str, Any]) -> None:
    (container,) = worker_pod(tmp_path, worker)["containers"]
    names = {entry["name"] for entry in container["env"] if entry["name"].startswith("HEADRACE_")}
    known = {
        f"HEADRACE_{name.upper()}"
        for name in (*(setting.name for setting in SETTINGS), "redis_url", "queue_urls", "stream_urls")
    }
    assert names <= known


def test_a_worker_may_write_the_deletion_cost_of_its_pod_only_if_it_is_asked_for(tmp_path: Path) -> None:
    plain = worker_pod(tmp_path, {})
    assert plain["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in plain
    pod = worker_pod(tmp_path, {"podDeletionCost": True})
    assert pod["automountServiceAccountToken"] is True
    env = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
    assert env["HEADRACE_POD_DELETION_COST"]["value"] == "true"
    assert env["POD_NAME"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    found = {each["kind"]: each for each in template(tmp_path, worker={"podDeletionCost": True})}
    assert found["ServiceAccount"]["metadata"]["name"] == pod["serviceAccountName"]
    assert found["Role"]["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    assert found["RoleBinding"]["subjects"][0]["name"] == pod["serviceAccountName"]


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        ({"engineArg": {}}, "engineArg"),
        ({"engineArgs": "gpu_memory_utilization=0.85"}, "engineArgs"),
        ({"engine": ""}, "engine"),
        ({"sharedMemory": "8 GB"}, "sharedMemory"),
        ({"tensorParallelSize": 0}, "tensorParallelSize"),
        ({"gpus": "2"}, "gpus"),
        ({"podAnnotations": {"port": 9464}}, "podAnnotations"),
        ({"topologySpreadConstraints": [{"maxSkew": 1}]}, "topologySpreadConstraints"),
    ],
)
def test_a_wrong_value_of_a_worker_is_refused(tmp_path: Path, worker: dict[str, Any], told: str) -> None:
    assert told in refused(tmp_path, worker=worker)


def test_a_pod_has_time_to_drain_and_begins_at_once(manifests: dict[str, dict[str, Any]]) -> None:
    pod = manifests["Deployment/demo-worker"]["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in worker["env"]}
    assert pod["terminationGracePeriodSeconds"] >= int(environment["HEADRACE_GRACE_SECONDS"]) + 30
    assert "kill -TERM 1" in worker["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert environment["HEADRACE_TENANTS"] == "acme,other-inc"
    assert worker["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert "secret" not in json.dumps(pod).replace("secretKeyRef", "")  # the password is in the Secret alone


def test_a_gateway_has_keys_probes_and_time_for_open_answers(manifests: dict[str, dict[str, Any]]) -> None:
    deployment = manifests["Deployment/demo-gateway"]["spec"]
    pod = deployment["template"]["spec"]
    (gateway,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in gateway["env"]}
    known = {"HEADRACE_REDIS_URL", "HEADRACE_QUEUE_URLS", "HEADRACE_STREAM_URLS"} | {
        variable_of(option, GATEWAY_PREFIX) for option in options_of(GatewaySettings)
    }
    assert set(environment) <= known
    (sleep,) = [int(word) for word in gateway["lifecycle"]["preStop"]["exec"]["command"][1:]]
    assert pod["terminationGracePeriodSeconds"] > sleep + int(environment["HEADRACE_GATEWAY_SHUTDOWN"])
    secrets = {volume["name"]: volume["secret"] for volume in pod["volumes"] if "secret" in volume}
    folders = {mount["name"]: mount["mountPath"] for mount in gateway["volumeMounts"]}
    assert secrets["keys"] == {"secretName": "gateway-keys"}
    assert environment["HEADRACE_GATEWAY_KEYS"] == f"{folders['keys']}/keys.toml"
    assert secrets["webhooks"] == {"secretName": "hooks", "defaultMode": 0o440}  # the pod's group reads it
    assert environment["HEADRACE_GATEWAY_WEBHOOKS"] == f"{folders['webhooks']}/webhooks.toml"
    assert {"name": "files", "persistentVolumeClaim": {"claimName": "uploads"}} in pod["volumes"]
    assert environment["HEADRACE_GATEWAY_FILES"] == folders["files"]
    probes = {name: gateway[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == {
        "startupProbe": {"path": "/health", "port": "http"},
        "readinessProbe": {"path": "/ready", "port": "http"},
        "livenessProbe": {"path": "/health/live", "port": "metrics"},
    }
    ports = {port["name"]: str(port["containerPort"]) for port in gateway["ports"]}
    assert ports == {
        "http": environment["HEADRACE_GATEWAY_PORT"],
        "metrics": environment["HEADRACE_GATEWAY_METRICS_PORT"],
    }
    assert gateway["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert "replicas" not in deployment  # it is the scaler's
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert "secret@" not in json.dumps(pod)  # the password is in the Secret alone
    assert manifests["Secret/demo-redis"]["stringData"]["gateway-url"]
    selected = manifests["Service/demo-gateway"]["spec"]["selector"]
    assert selected.items() <= deployment["template"]["metadata"]["labels"].items()


def test_without_a_gateway_the_chart_has_nothing_of_one(tmp_path: Path) -> None:
    found = [each for each in template(tmp_path, gateway={}) if each["kind"] not in ("PrometheusRule", "ConfigMap")]
    assert "gateway" not in json.dumps(found).replace("headrace-gateway:", "")  # the image, for the exporter


@pytest.mark.parametrize(
    ("gateway", "told"),
    [
        ({"enabled": True}, "gateway.keysSecret is required"),
        ({"enabled": True, "keysSecret": "k", "replica": 2}, "replica"),
        ({"enabled": True, "keysSecret": "k", "service": {"port": 0}}, "port"),
    ],
)
def test_a_gateway_without_keys_or_with_a_wrong_value_is_refused(
    tmp_path: Path, gateway: dict[str, Any], told: str
) -> None:
    assert told in refused(tmp_path, gateway=gateway)


def test_a_worker_gets_the_gpus_that_are_asked_for_and_keeps_its_other_limits(tmp_path: Path) -> None:
    pod = worker_pod(tmp_path, {"gpus": 2, "runtimeClassName": "nvidia"})
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2, "memory": "8Gi"}
    assert pod["containers"][0]["resources"]["requests"] == {"cpu": "4", "memory": "8Gi"}


def test_the_scaler_asks_for_messages_that_wait_or_run_and_does_not_take_silence_for_none(
    manifests: dict[str, dict[str, Any]],
) -> None:
    scaled = manifests["ScaledObject/demo-worker"]["spec"]
    assert "nvidia.com/gpu" not in json.dumps(manifests["Deployment/demo-worker"])
    assert "replicas" not in manifests["Deployment/demo-worker"]["spec"]  # it is the scaler's
    (trigger,) = scaled["triggers"]
    assert 'headrace_queue_messages{model="tiny",state=~"ready|unacked"}' in trigger["metadata"]["query"]
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert trigger["metadata"]["threshold"] == "51"  # 0.8 of 64 slots
    assert scaled["minReplicaCount"] == 0


def test_rules_and_dashboards_in_the_chart_are_those_of_this_checkout(manifests: dict[str, dict[str, Any]]) -> None:
    rules = yaml.safe_load((ROOT / "monitoring" / "prometheus" / "rules.yml").read_text(encoding="utf-8"))
    assert manifests["PrometheusRule/demo"]["spec"] == rules
    data = manifests["ConfigMap/demo-dashboards"]["data"]
    assert data == {f"headrace-{name}": text for name, text in dashboards.rendered().items()}


@pytest.mark.parametrize("component", ["worker", "exporter", "gateway"])
def test_the_scraped_job_has_the_name_that_rules_and_dashboards_use(
    manifests: dict[str, dict[str, Any]], component: str
) -> None:
    (endpoint,) = manifests[f"PodMonitor/demo-{component}"]["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"][0]["replacement"] == f"headrace-{component}"
    labels = manifests[f"Deployment/demo-{component}"]["spec"]["template"]["metadata"]["labels"]
    wanted = manifests[f"PodMonitor/demo-{component}"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= labels.items()


def test_a_model_must_be_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [helm(), "template", "demo", str(CHART)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode != 0
    assert "servedName" in done.stderr
