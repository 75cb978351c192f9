"""A device that is not there, or is not what it should be, is said in one sentence; nothing goes on with the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import _BACKENDS, _COMPILER_FNS, register_backend

from engine.test_parity import references, workload
from engine.tiny_models import TinyModel, generate_greedily
from headrace_engine.config import EngineArgs
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.errors import ConfigError
from headrace_engine.runner.loader import create_runner
from headrace_engine.runner.static.neuron import Neuron
from headrace_engine.runner.static.runner import StaticPagedRunner
from headrace_engine.runner.static.xla import XLA

pytestmark = pytest.mark.torch


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A folder that looks as /dev does where the driver is loaded."""
    (tmp_path / "neuron0").touch()
    return tmp_path


@pytest.fixture
def neuron_backend() -> Iterator[list[torch.fx.GraphModule]]:
    """A Dynamo backend of TorchNeuron's name; collects what it compiles."""
    compiled: list[torch.fx.GraphModule] = []

    def compile_graph(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled.append(module)
        return module.forward

    register_backend(aot_autograd(fw_compiler=compile_graph), name="neuron")
    yield compiled
    for registry in (_BACKENDS, _COMPILER_FNS):
        registry.pop("neuron", None)


def test_a_machine_without_neuron_devices_is_refused(llama: TinyModel) -> None:
    config = EngineArgs(model=llama.folder, device="neuron").create_engine_config()
    with pytest.raises(ConfigError, match="device neuron is not there: /dev holds no neuron0"):
        create_runner(config)


def test_a_device_without_its_library_is_refused(devices: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be imported .* PyPI is an empty placeholder"):
        Neuron(devices).probe()


def test_the_older_library_of_the_same_name_is_refused(devices: Path) -> None:
    with pytest.raises(ConfigError, match=r"brings no torch.compile backend 'neuron'.* served by device xla"):
        Neuron(devices, load=lambda name: SimpleNamespace()).probe()


@pytest.mark.usefixtures("neuron_backend")
def test_a_device_that_does_not_answer_is_refused(devices: Path) -> None:
    with pytest.raises(ConfigError, match="device neuron does not answer"):
        Neuron(devices, load=lambda name: SimpleNamespace()).probe()


def test_operators_that_ran_on_the_cpu_instead_end_the_start(devices: Path) -> None:
    flavour = Neuron(devices, load=lambda name: SimpleNamespace(get_fallback_ops=lambda: {"aten::sort", "aten::abs"}))
    with pytest.raises(ConfigError):
        flavour.probe()
    with pytest.raises(ConfigError, match="on the CPU instead of the device: aten::abs, aten::sort"):
        flavour.after_warm_up()


def test_a_device_that_is_there_is_used(devices: Path) -> None:
    # in an interpreter of its own, since torch learns a device's name once and for all
    program = f"""
import torch
from pathlib import Path
from types import SimpleNamespace
from torch._dynamo.backends.registry import register_backend
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from headrace_engine.runner.static.neuron import Neuron
_setup_privateuseone_for_python_backend("neuron")
library = torch.library.Library("aten", "IMPL")
library.impl("empty.memory_format", lambda size, **options: torch.zeros(size), "PrivateUse1")
register_backend(lambda module, inputs: module.forward, name="neuron")
flavour = Neuron(Path({str(devices)!r}), load=lambda name: SimpleNamespace())
flavour.probe()
assert flavour.device.type == "neuron", flavour.device
assert flavour.free_memory() is None
flavour.after_warm_up()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


class NeuronOnCPU(Neuron):
    """Everything of the real one but its device."""

    def probe(self) -> None:
        """The CPU is always there."""


def test_steps_go_through_the_backend_of_that_name(
    tiny_model: Callable[[str], TinyModel], neuron_backend: list[torch.fx.GraphModule]
) -> None:
    model = tiny_model("qwen3")
    buckets = {"prefill_buckets": [64], "decode_buckets": [4], "context_buckets": [112]}
    args = {"dtype": "float32", "num_blocks": 40, "max_num_seqs": 4, "max_model_len": 112, **buckets}
    config = EngineArgs(model=model.folder, device="neuron", **args).create_engine_config()  # type: ignore[arg-type]
    flavour = NeuronOnCPU()
    core = EngineCore(config, StaticPagedRunner(config, flavour))
    assert flavour.num_graphs() == len(neuron_backend) == 2
    assert generate_greedily(core, workload()[:8]) == references(model)[:8]
    assert flavour.num_graphs() == len(neuron_backend) == 2


def test_a_device_that_tells_no_memory_wants_to_be_told(llama: TinyModel) -> None:
    class Silent(NeuronOnCPU):
        def free_memory(self) -> int | None:
            return None

    config = EngineArgs(model=llama.folder, device="neuron").create_engine_config()
    runner = StaticPagedRunner(config, Silent())
    runner.load_model()
    with pytest.raises(ConfigError, match="neuron does not tell its free memory: set kv_cache_memory"):
        runner.kv_spec()


def test_xla_is_not_taken_from_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(ConfigError, match="device xla needs PJRT_DEVICE=NEURON, the environment says CPU"):
        XLA().probe()


def test_a_machine_without_xla_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    with pytest.raises(ConfigError, match=r"device xla (needs PyTorch/XLA|finds no NEURON device)"):
        XLA().probe()
