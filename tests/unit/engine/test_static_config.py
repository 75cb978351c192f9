"""Where a rank's compiled graphs are kept is said in time, or not at all."""

from __future__ import annotations

import pytest

from headrace_engine.errors import ConfigError
from headrace_engine.static_config import StaticConfig


@pytest.mark.parametrize(
    ("device", "variable"), [("neuron", "TORCH_NEURONX_NEFF_CACHE_DIR"), ("xla", "NEURON_COMPILE_CACHE_URL")]
)
def test_each_rank_keeps_its_graphs_in_a_folder_of_its_own(device: str, variable: str) -> None:
    environ: dict[str, str] = {}
    config = StaticConfig(compile_cache_dir="/cache")
    config.prepare_environment(device, 3, environ, is_torch_imported=False)
    assert environ == {variable: "/cache/rank3"}


def test_a_cache_that_comes_too_late_is_refused() -> None:
    config = StaticConfig(compile_cache_dir="/cache")
    with pytest.raises(ConfigError, match="set TORCH_NEURONX_NEFF_CACHE_DIR=/cache/rank0 in the"):
        config.prepare_environment("neuron", 0, {}, is_torch_imported=True)
    environ = {"TORCH_NEURONX_NEFF_CACHE_DIR": "/cache/rank0"}
    config.prepare_environment("neuron", 0, environ, is_torch_imported=True)


def test_without_a_cache_folder_the_environment_is_left_alone() -> None:
    environ: dict[str, str] = {}
    StaticConfig().prepare_environment("static-cpu", 0, environ, is_torch_imported=True)
    assert environ == {}


@pytest.mark.parametrize(("visible", "cores"), [(None, [0, 1, 2]), ("4-6", [4, 5, 6]), ("1,8-9,12", [1, 8, 9])])
def test_each_rank_has_a_core_of_its_own(visible: str | None, cores: list[int]) -> None:
    environ = {} if visible is None else {"NEURON_RT_VISIBLE_CORES": visible}
    config = StaticConfig(tensor_parallel_size=3)
    found = []
    for rank in range(3):  # as the processes do: the first sets its own environment, the others inherit it
        config.prepare_environment("neuron", rank, environ, is_torch_imported=False)
        found.append(int(environ["NEURON_RT_VISIBLE_CORES"]))
    assert found == cores


def test_too_few_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 4, but NEURON_RT_VISIBLE_CORES=0-2 names 3 cores"):
        StaticConfig(tensor_parallel_size=4).prepare_environment(
            "neuron", 0, {"NEURON_RT_VISIBLE_CORES": "0-2"}, is_torch_imported=False
        )
