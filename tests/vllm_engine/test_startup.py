"""What keeps the engine from starting is reported in a sentence, as what no retry can mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_engine.errors import ConfigError, HeadraceEngineError, ModelLoadError
from vllm_engine.driven_engine import DrivenEngine


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"engine_args": {"no_such_option": 1}}, ConfigError, "no_such_option"),
        ({"engine_args": {"load_format": "no_such_format"}}, ConfigError, "no_such_format"),
        ({"quantization": "no_such_method"}, ConfigError, "no_such_method"),
        ({"max_model_len": 1_000_000}, ConfigError, "1000000"),
        ({"kv_cache_memory": 1 << 20}, ConfigError, "memory for the cache blocks"),
        ({"kv_cache_memory": 1 << 50}, ConfigError, "memory"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 64}, ConfigError, "max_num_seqs"),
        ({"model": "/nowhere/at-all"}, ModelLoadError, "there is no such folder"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else None,
)
def test_it_is_one_sentence_and_no_retry(
    options: dict[str, Any], given: dict[str, Any], error: type[HeadraceEngineError], sentence: str
) -> None:
    eager = {"engine_args": {"enforce_eager": True, **given.get("engine_args", {})}}
    with pytest.raises(error) as caught:
        DrivenEngine(**{**options, **given, **eager})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_checkpoint_is_one_sentence_and_no_retry(options: dict[str, Any], tmp_path: Path) -> None:
    for file in Path(options["model"]).iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes((100).to_bytes(8, "little") + b"{no header")
    with pytest.raises((ConfigError, ModelLoadError), match=r"^[^\n]+$"):
        DrivenEngine(**{**options, "model": str(tmp_path)})


def test_ranks_without_processors_of_their_own_are_one_sentence_and_no_retry(
    options: dict[str, Any], engine: DrivenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine.info.device != "cpu" or len([*Path("/sys/devices/system/node").glob("node[0-9]*")]) >= 3:
        pytest.skip("vLLM finds processors for each rank")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    with pytest.raises(ConfigError, match="bind threads manually"):
        DrivenEngine(**options, tensor_parallel_size=3)


def test_adapters_on_a_cpu_are_refused_where_they_leak_into_other_requests(
    options: dict[str, Any], engine: DrivenEngine
) -> None:
    draws = engine.process.capabilities.draws
    if engine.info.device != "cpu" or draws is None or draws >= "vllm-0.33":
        pytest.skip("this vLLM keeps them apart")
    with pytest.raises(ConfigError, match="applies an adapter to requests without one"):
        DrivenEngine(**options, enable_lora=True)


def test_an_interpreter_without_vllm_is_told_what_to_install(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="pip install vllm"):
        DrivenEngine(**{**options, "engine_python": None})
