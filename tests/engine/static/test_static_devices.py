"""A device that is not there, or is not what it should be, is said in one sentence; nothing continues on the CPU."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.static.fake_neuron import NeuronOnCPU, fake_backend
from engine.static.traced_graphs import Graph
from engine.tiny_models import TinyModel
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.errors import ConfigError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.loader import create_runner
from headrace_engine.runner.static.compiler_backend import CompilerBackend, EagerCPU
from headrace_engine.runner.static.neuron import Neuron
from headrace_engine.runner.static.runner import StaticPagedRunner
from headrace_engine.runner.static.xla import XLA

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/static")


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A folder that looks as /dev does where the driver is loaded."""
    (tmp_path / "neuron0").touch()
    return tmp_path


@pytest.fixture
def neuron_backend() -> Iterator[list[Graph]]:
    """A Dynamo backend of TorchNeuron's name; collects what it compiles."""
    with fake_backend() as graphs:
        yield graphs


def test_a_machine_without_neuron_devices_is_refused(llama: TinyModel) -> None:
    config = EngineArgs(model=llama.folder, device="neuron").create_engine_config()
    with pytest.raises(ConfigError, match="device neuron was not found: /dev has no neuron0"):
        create_runner(config)


def test_a_device_without_its_library_is_refused(devices: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be imported .* PyPI is an empty placeholder"):
        Neuron(devices).probe()


def test_the_older_library_of_the_same_name_is_refused(devices: Path) -> None:
    with pytest.raises(ConfigError, match=r"brings no torch.compile backend 'neuron'.* served by device xla"):
        Neuron(devices, load=lambda name: SimpleNamespace()).probe()


@pytest.mark.usefixtures("neuron_backend")
def test_a_device_that_does_not_answer_is_refused(devices: Path) -> None:
    with pytest.raises(ConfigError, match="device neuron does not respond"):
        Neuron(devices, load=lambda name: SimpleNamespace()).probe()


def test_operators_that_torchneuron_ran_on_the_cpu_are_known_by_name(devices: Path) -> None:
    ran = {"aten::sort", "aten::abs"}
    library = SimpleNamespace(get_fallback_ops=lambda: ran, clear_op_tracking=ran.clear)
    compiler_backend = Neuron(devices, load=lambda name: library)
    with pytest.raises(ConfigError):
        compiler_backend.probe()
    assert compiler_backend.fallback_operators() == ["aten::abs", "aten::sort"]
    compiler_backend.compile(torch.nn.Identity(), 1)
    assert compiler_backend.fallback_operators() == []  # loading is no part of a step


class FallingBack(EagerCPU):
    """Computes some operators elsewhere."""

    found: list[str]

    def __init__(self, *found: str) -> None:
        self.found = list(found)

    def fallback_operators(self) -> list[str]:
        return self.found


def serve(model: TinyModel, compiler_backend: CompilerBackend) -> EngineCore:
    buckets = {"prefill_buckets": [64], "decode_buckets": [4], "context_buckets": [112]}
    args = {"dtype": "float32", "num_blocks": 40, "max_num_seqs": 4, "max_model_len": 112, **buckets}
    config = EngineArgs(model=model.folder, device="static-cpu", **args).create_engine_config()  # type: ignore[arg-type]
    return EngineCore(config, StaticPagedRunner(config, compiler_backend))


def test_operators_that_ran_on_the_cpu_instead_end_the_start(llama: TinyModel) -> None:
    with pytest.raises(ConfigError, match="static-cpu ran operators on the CPU instead: aten::abs, aten::sort"):
        serve(llama, FallingBack("aten::abs", "aten::sort"))


def test_operators_that_run_on_the_cpu_while_serving_are_counted(llama: TinyModel) -> None:
    compiler_backend = FallingBack()
    core = serve(llama, compiler_backend)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    core.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[5, 6], sampling_params=params, seed=0))
    assert core.step().stats.fallback_operators == 0
    compiler_backend.found.append("aten::sort")
    assert core.step().stats.fallback_operators == 1


def test_compilation_shows_a_bar_where_somebody_watches(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    serve(llama, EagerCPU())
    assert "Compiling: 100%" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()


def test_compilation_says_how_many_shapes_and_how_long_they_took(
    llama: TinyModel, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", "headrace_engine")
    serve(llama, EagerCPU())
    lines = "\n".join(caplog.messages)
    assert "compiling 2 shapes for static-cpu" in lines
    assert re.search(r"compiled 2 of 2: decode of 4 x 1 tokens over 4 blocks, \d+\.\d s", lines)
    assert re.search(r"2 shapes, 0 graphs compiled in \d+\.\d s", lines)
    assert "Compiling" not in capsys.readouterr().err


def test_a_device_that_is_there_is_used(devices: Path) -> None:
    # in an interpreter of its own, since torch learns a device's name once and for all
    program = f"""
import torch
from pathlib import Path
from types import SimpleNamespace
from torch._dynamo.backends.registry import register_backend
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from headrace_engine.runner.static.compiler_backend import EagerCPU, CompilerBackend
from headrace_engine.runner.static.neuron import Neuron
_setup_privateuseone_for_python_backend("neuron")
library = torch.library.Library("aten", "IMPL")
library.impl("empty.memory_format", lambda size, **options: torch.zeros(size), "PrivateUse1")
register_backend(lambda module, inputs: module.forward, name="neuron")
compiler_backend = Neuron(Path({str(devices)!r}), load=lambda name: SimpleNamespace())
compiler_backend.probe()
assert compiler_backend.device.type == "neuron", compiler_backend.device
assert compiler_backend.free_memory() is None
assert compiler_backend.fallback_operators() == []
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_device_that_tells_no_memory_wants_to_be_told(llama: TinyModel) -> None:
    class Silent(NeuronOnCPU):
        def free_memory(self) -> int | None:
            return None

    config = EngineArgs(model=llama.folder, device="neuron").create_engine_config()
    runner = StaticPagedRunner(config, Silent())
    runner.load_model()
    with pytest.raises(ConfigError, match="neuron does not report its free memory: set kv_cache_memory"):
        runner.kv_spec()


def test_xla_is_not_taken_from_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(ConfigError, match="device xla needs PJRT_DEVICE=NEURON, got CPU"):
        XLA().probe()


def test_a_machine_without_xla_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    with pytest.raises(ConfigError, match=r"device xla (needs PyTorch/XLA|finds no NEURON device)"):
        XLA().probe()
