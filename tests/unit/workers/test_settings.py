"""A worker's settings reach its engine, and an invalid value ends in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace_engine.errors import ConfigError
from headrace_engine.options.speculative_config import SpeculativeConfig
from headrace_workers.errors import WorkerSettingsError
from headrace_workers.settings import WorkerSettings
from unit.engine import fake_engine


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("HEADRACE_MODEL", "/models/some-model")
    return monkeypatch


def test_speculative_decoding_is_off_by_default(setting: pytest.MonkeyPatch) -> None:
    setting.delenv("HEADRACE_SPECULATIVE_CONFIG", raising=False)
    assert WorkerSettings.from_env().engine_config().speculative is None


def test_defaults_of_messages_are_those_of_the_wire_unless_the_operator_changes_them(
    setting: pytest.MonkeyPatch,
) -> None:
    model = WorkerSettings.from_env().engine_config().model
    assert (model.generation_config, model.override_generation_config) == ("vllm", {})
    setting.setenv("HEADRACE_GENERATION_CONFIG", "auto")
    setting.setenv("HEADRACE_OVERRIDE_GENERATION_CONFIG", '{"temperature": 0.5}')
    model = WorkerSettings.from_env().engine_config().model
    assert (model.generation_config, model.override_generation_config) == ("auto", {"temperature": 0.5})


def test_speculative_decoding_is_set_as_json(setting: pytest.MonkeyPatch) -> None:
    setting.setenv(
        "HEADRACE_SPECULATIVE_CONFIG", '{"method": "draft_model", "model": "d", "num_speculative_tokens": 2}'
    )
    assert WorkerSettings.from_env().engine_config().speculative == SpeculativeConfig(
        method="draft_model", model="d", num_speculative_tokens=2
    )


@pytest.mark.parametrize(("value", "on"), [("true", True), ("1", True), ("false", False)])
def test_batch_invariance_is_a_switch(setting: pytest.MonkeyPatch, value: str, on: bool) -> None:
    assert not WorkerSettings.from_env().engine_config().model.batch_invariant
    setting.setenv("HEADRACE_BATCH_INVARIANT", value)
    assert WorkerSettings.from_env().engine_config().model.batch_invariant is on


@pytest.mark.parametrize("value", ["{bad", "[1]", "ngram"])
def test_an_invalid_json_object_is_refused_by_name(setting: pytest.MonkeyPatch, value: str) -> None:
    setting.setenv("HEADRACE_SPECULATIVE_CONFIG", value)
    with pytest.raises(WorkerSettingsError, match="HEADRACE_SPECULATIVE_CONFIG "):
        WorkerSettings.from_env()


def test_an_invalid_value_in_a_json_object_is_refused_by_name(setting: pytest.MonkeyPatch) -> None:
    setting.setenv("HEADRACE_SPECULATIVE_CONFIG", '{"method": "ngram", "num_speculative_tokens": 99}')
    with pytest.raises(ConfigError, match="num_speculative_tokens must be an integer from 1 to 16, got 99"):
        WorkerSettings.from_env().engine_config()


def test_a_folder_of_adapters_needs_an_engine_that_loads_them_while_it_runs(
    setting: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting.setenv("HEADRACE_LORA_DIR", str(tmp_path))
    lora = WorkerSettings.from_env().engine_config().lora
    assert lora is not None and lora.needs_hot_load
    setting.delenv("HEADRACE_LORA_DIR")
    setting.setenv("HEADRACE_LORA_MODULES", f"a={tmp_path}")
    lora = WorkerSettings.from_env().engine_config().lora
    assert lora is not None and not lora.needs_hot_load


def test_logits_processors_are_paths_separated_by_commas(setting: pytest.MonkeyPatch) -> None:
    paths = ["engine.processors:OnlyEven", "engine.processors:CountUp"]
    setting.setenv("HEADRACE_LOGITS_PROCESSORS", " , ".join(paths))
    assert WorkerSettings.from_env().engine_config().model.logits_processors == paths
    setting.setenv("HEADRACE_LOGITS_PROCESSORS", "engine.processors:Missing")
    with pytest.raises(ConfigError, match=r"logits processor 'engine\.processors:Missing' cannot be imported"):
        WorkerSettings.from_env().engine_config()


def test_the_schedulers_options_are_settings(setting: pytest.MonkeyPatch) -> None:
    config = WorkerSettings.from_env().engine_config()
    assert (config.scheduler.watermark, config.cache.enable_prefix_caching) == (0.01, True)
    setting.setenv("HEADRACE_WATERMARK", "0.2")
    setting.setenv("HEADRACE_LONG_PREFILL_TOKEN_THRESHOLD", "256")
    setting.setenv("HEADRACE_ENABLE_PREFIX_CACHING", "false")
    setting.setenv("HEADRACE_KV_CACHE_DTYPE", "bfloat16")
    assert not config.scheduler.async_scheduling
    config = WorkerSettings.from_env().engine_config()
    assert config.scheduler.watermark == 0.2
    assert config.scheduler.long_prefill_token_threshold == 256
    assert not config.cache.enable_prefix_caching
    assert config.cache.kv_cache_dtype == "bfloat16"
    setting.setenv("HEADRACE_KV_CACHE_DTYPE", "auto")
    setting.setenv("HEADRACE_DEVICE", "cuda")
    setting.setenv("HEADRACE_ASYNC_SCHEDULING", "true")
    assert WorkerSettings.from_env().engine_config().scheduler.async_scheduling
    setting.setenv("HEADRACE_WATERMARK", "1.0")
    with pytest.raises(WorkerSettingsError, match="HEADRACE_WATERMARK "):
        WorkerSettings.from_env()


def test_more_queues_come_after_the_models_own(setting: pytest.MonkeyPatch) -> None:
    assert WorkerSettings.from_env().served_names == ("some-model",)
    setting.setenv("HEADRACE_QUEUES", "bulk, night,some-model,bulk")
    assert WorkerSettings.from_env().served_names == ("some-model", "bulk", "night")
    setting.setenv("HEADRACE_QUEUES", "bulk," + 201 * "b")
    with pytest.raises(WorkerSettingsError, match=r"HEADRACE_QUEUES .*must be a printable string"):
        WorkerSettings.from_env()


def test_another_engine_checks_its_own_values(setting: pytest.MonkeyPatch) -> None:
    fake_engine.offer(setting, "unit.engine.fake_engine:ENGINE")
    setting.setenv("HEADRACE_ENGINE", "fake")
    setting.setenv("HEADRACE_ENGINE_PYTHON", sys.executable)
    setting.setenv("HEADRACE_ENGINE_ARGS", '{"gpu_share": 0.5}')
    setting.setenv("HEADRACE_DTYPE", "half")
    setting.setenv("HEADRACE_QUANTIZATION", "fp8")
    config = WorkerSettings.from_env().engine_config()
    assert (config.engine, config.engine_python, config.engine_args) == ("fake", sys.executable, {"gpu_share": 0.5})
    assert (config.model.dtype, config.model.quantization) == ("half", "fp8")
    setting.setenv("HEADRACE_QUANTIZATION", "int8")
    with pytest.raises(ConfigError, match="quantization is int8, allowed is fp8"):
        WorkerSettings.from_env().engine_config()


def test_an_engine_has_its_own_stall_limit_unless_the_operator_sets_one(setting: pytest.MonkeyPatch) -> None:
    fake_engine.offer(setting, "unit.engine.fake_engine:ENGINE")
    assert WorkerSettings.from_env().stall_limit() == 60
    setting.setenv("HEADRACE_ENGINE", "fake")
    assert WorkerSettings.from_env().stall_limit() == 300
    setting.setenv("HEADRACE_STALL_SECONDS", "5")
    assert WorkerSettings.from_env().stall_limit() == 5


def test_the_liveness_limit_is_at_least_twice_the_stall_limit(setting: pytest.MonkeyPatch) -> None:
    fake_engine.offer(setting, "unit.engine.fake_engine:ENGINE")
    assert WorkerSettings.from_env().step_timeout() == 120
    setting.setenv("HEADRACE_ENGINE", "fake")
    assert WorkerSettings.from_env().step_timeout() == 600
    setting.setenv("HEADRACE_STALL_SECONDS", "5")
    assert WorkerSettings.from_env().step_timeout() == 120


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--device", "tpu"], "device must be one of auto, cpu, cuda, neuron, xla, static-cpu, got 'tpu'"),
        (["--dtype", "float16"], "dtype must be one of auto, float32, bfloat16, got 'float16'"),
        (["--engine", "nobody"], "engine must be one of headrace, vllm, got 'nobody'"),
        (["--engine-python", "/no/python"], "engine_python '/no/python' cannot be run"),
        (["--engine-args", "gpu"], "HEADRACE_ENGINE_ARGS "),
    ],
)
def test_an_invalid_flag_ends_the_command_with_one_sentence(flags: list[str], sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from headrace_cli.main import main; main()", "worker", "--model", "/m", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
