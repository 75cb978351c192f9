"""Where a rank's compiled graphs are kept is said in time, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_engine.errors import ConfigError
from headrace_engine.options.static_config import StaticConfig


@pytest.mark.parametrize(
    ("device", "variable"), [("neuron", "TORCH_NEURONX_NEFF_CACHE_DIR"), ("xla", "NEURON_COMPILE_CACHE_URL")]
)
def test_each_rank_keeps_its_graphs_in_a_folder_of_its_own(device: str, variable: str, tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    config = StaticConfig(compile_cache_dir=str(tmp_path / "cache"))
    for _ in range(2):  # as two workers do that share a folder
        config.prepare_environment(device, 3, environ, is_torch_imported=False)
    assert environ == {variable: str(tmp_path / "cache" / "rank3")}
    assert list((tmp_path / "cache" / "rank3").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = StaticConfig(compile_cache_dir=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"compile_cache_dir is '.*/file', which cannot be written: .*rank0"):
        config.prepare_environment("neuron", 0, {}, is_torch_imported=False)


def test_a_cache_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    config = StaticConfig(compile_cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=f"set TORCH_NEURONX_NEFF_CACHE_DIR={tmp_path}/rank0 in the"):
        config.prepare_environment("neuron", 0, {}, is_torch_imported=True)
    environ = {"TORCH_NEURONX_NEFF_CACHE_DIR": f"{tmp_path}/rank0"}
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


def test_cores_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ConfigError, match="NEURON_RT_VISIBLE_CORES=all names no cores, must be as 0-3 or 0,2"):
        StaticConfig(tensor_parallel_size=2).prepare_environment(
            "neuron", 0, {"NEURON_RT_VISIBLE_CORES": "all"}, is_torch_imported=False
        )
