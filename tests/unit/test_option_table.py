"""An engine option is declared once; settings, flags, the reference, the chart and vLLM's options agree with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from headrace_broker.settings import BrokerSettings
from headrace_cli.commands.exporter import exporter
from headrace_cli.commands.gateway import gateway
from headrace_cli.commands.worker import worker
from headrace_cli.exporter import EXPORTER_PREFIX, ExporterSettings
from headrace_engine.errors import ConfigError
from headrace_engine.options.engine_args import AsyncEngineArgs, EngineArgs
from headrace_engine.options.engine_options import EngineOptions
from headrace_engine.vllm_names import RENAMED
from headrace_engine_vllm.options import vllm_options
from headrace_gateway.settings import GATEWAY_PREFIX, GatewaySettings
from headrace_wire.environment import variable_of
from headrace_wire.option import Option, options_of
from headrace_workers.errors import WorkerSettingsError
from headrace_workers.settings import NOT_SETTINGS, SETTINGS, WorkerSettings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "headrace"
OPTIONS = {option.name: option for option in options_of(EngineOptions)}
ENGINES_SETTINGS = [option for option in SETTINGS if option.name in OPTIONS]
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", Mapping[str, Any]: "object"}

NOT_FOR_VLLM = {
    "engine": "chooses it",
    "engine_python": "runs it",
    "seed": "each request that has none gets one from the parent",
    "max_logprobs": "the parent refuses requests; named log-probabilities need all of them",
    "max_num_queued_requests": "the parent refuses requests",
    "max_num_queued_tokens": "the parent refuses requests",
    "batch_invariant": "an environment variable of the child",
    "spec_method": "half of speculative_config",
    "spec_model": "half of speculative_config",
    "spec_tokens": "half of speculative_config",
}


def sample(option: Option) -> tuple[str, object]:
    """Return a text that is not the default, and its value."""
    if option.metavar in ("JSON", "N,N", "PATHS", "SIZE"):
        return {
            "JSON": ('{"top_k": 3}', {"top_k": 3}),
            "N,N": ("128,512", [128, 512]),
            "PATHS": ("a:B, c:D", ["a:B", "c:D"]),
            "SIZE": ("1.5GiB", 3 << 29),
        }[option.metavar]
    if option.kind is bool:
        return ("false", False) if option.default else ("yes", True)
    if option.kind is float:
        return "0.5", 0.5
    return ("7", 7) if option.kind is int else ("acme", "acme")


def name_of(option: Option) -> str:
    return option.name


def chart_values() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the chart's schema and values for the worker, by option name."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]["worker"]
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["worker"]
    return tuple(  # type: ignore[return-value]
        {
            snake: found
            for name, found in part.items()
            if (snake := re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)) in OPTIONS
        }
        for part in (schema["properties"], values)
    )


def test_every_field_that_users_write_is_a_declared_option() -> None:
    assert set(EngineOptions.__dataclass_fields__) == {*OPTIONS, *RENAMED}
    assert set(AsyncEngineArgs.__dataclass_fields__) == {*OPTIONS, *RENAMED, "core_in_process"}


def test_every_option_of_the_engine_is_a_setting_or_has_a_reason_why_not() -> None:
    settings = {option.name for option in SETTINGS}
    assert {*OPTIONS} - settings == {*NOT_SETTINGS}
    assert all(NOT_SETTINGS.values())


@pytest.mark.parametrize("option", SETTINGS, ids=name_of)
def test_every_setting_is_a_variable_a_flag_and_a_row_of_the_reference(option: Option) -> None:
    text, value = sample(option)
    environ = {"HEADRACE_MODEL": "m", f"HEADRACE_{option.name.upper()}": text}
    if option.name in ("tool_parser", "reasoning_parser"):
        environ[f"HEADRACE_{option.name.upper()}"] = value = "openai"
    assert getattr(WorkerSettings.from_env(environ), option.name) == value
    flag = f"--{option.name.replace('_', '-')}"
    assert flag in [name for parameter in worker.params for name in parameter.opts]
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert f"| `HEADRACE_{option.name.upper()}`<br>`{flag}`" in page


OTHER_TABLES: dict[str, tuple[type, str, click.Command]] = {
    "queue": (BrokerSettings, "HEADRACE", worker),
    "gateway": (GatewaySettings, GATEWAY_PREFIX, gateway),
    "exporter": (ExporterSettings, EXPORTER_PREFIX, exporter),
}
NO_FLAG = {"max_queued_requests": "clients read it, and no worker"}


@pytest.mark.parametrize("table", OTHER_TABLES)
def test_every_setting_of_queue_gateway_and_exporter_is_a_variable_a_flag_and_a_row(table: str) -> None:
    kind, prefix, command = OTHER_TABLES[table]
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    flags = {flag for parameter in command.params for flag in parameter.opts}
    for option in options_of(kind):
        row = f"| `{variable_of(option, prefix)}`"
        if option.name not in NO_FLAG:
            flag = f"--{option.name.replace('_', '-')}"
            assert flag in flags
            row += f"<br>`{flag}` |"
        assert row in page


@pytest.mark.parametrize("table", OTHER_TABLES)
def test_every_setting_is_read_somewhere(table: str) -> None:
    code = "".join(
        path.read_text(encoding="utf-8")
        for package in ("broker", "workers", "gateway", "cli")
        for path in (ROOT / package).rglob("*.py")
    )
    options = options_of(OTHER_TABLES[table][0])
    assert [
        option.name for option in options if not re.search(rf"\b(self|settings|broker)\.{option.name}\b", code)
    ] == []


@pytest.mark.parametrize("option", SETTINGS, ids=name_of)
def test_the_help_of_the_command_has_the_meaning_of_a_setting(option: Option) -> None:
    told = CliRunner().invoke(worker, ["--help"], terminal_width=100).output
    assert "".join(option.help.split()) in "".join(told.split())  # lines end anywhere


def test_the_chart_declares_an_option_as_the_engine_does() -> None:
    schemas, values = chart_values()
    assert {*schemas} == {*values} != set()
    template = (CHART / "templates" / "worker.yaml").read_text(encoding="utf-8")
    for name, schema in schemas.items():
        option = OPTIONS[name]
        expected = {"type": TYPES[option.kind]} | ({} if option.least is None else {"minimum": option.least})
        assert expected.items() <= schema.items(), name
        assert values[name] == ("" if option.default is None else option.default), name
        assert f"HEADRACE_{name.upper()}," in template


def test_settings_without_a_value_in_the_chart_can_be_set_by_extra_env() -> None:
    schemas, _ = chart_values()
    unnamed = {option.name for option in ENGINES_SETTINGS} - {*schemas} - {"model"}
    assert unnamed, "extraEnv is not needed any more"
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert "extraEnv" in schema["properties"]["worker"]["properties"]


@pytest.mark.parametrize("option", OPTIONS.values(), ids=name_of)
def test_vllm_gets_an_option_or_refuses_it(option: Option) -> None:
    more: dict[str, Any] = {"enable_lora": True} if option.name.startswith("max_") else {}
    value: Any = sample(option)[1]
    value = {"scheduling_policy": "priority", "max_lora_rank": 64}.get(option.name, value)
    if option.name in NOT_FOR_VLLM:
        return
    plain = vllm_options(EngineArgs(model="m", engine="vllm", **more).create_engine_config())
    args = EngineArgs(**{"model": "m", "engine": "vllm", **more, option.name: value})
    try:
        given = vllm_options(args.create_engine_config())
    except ConfigError as error:
        refusal = str(error)
    else:
        refusal = "" if given == plain else option.name
    assert option.name in refusal


@pytest.mark.parametrize(
    "option", [option for option in SETTINGS if option.limits is not None and option.metavar != "SIZE"], ids=name_of
)
@pytest.mark.parametrize("text", ["many", "-9", "true"])
def test_a_setting_beyond_its_limit_is_refused_with_the_value_and_the_limit(option: Option, text: str) -> None:
    with pytest.raises(WorkerSettingsError) as refused:
        WorkerSettings.from_env({"HEADRACE_MODEL": "m", f"HEADRACE_{option.name.upper()}": text})
    assert str(refused.value) == f"HEADRACE_{option.name.upper()} {option.limits}, got {text!r}"


@pytest.mark.parametrize("option", [option for option in OPTIONS.values() if option.limits is not None], ids=name_of)
@pytest.mark.parametrize("value", ["many", -9, True])
def test_an_option_beyond_its_limit_is_refused_with_the_same_limit(option: Option, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineArgs(model="m", **{option.name: value}).create_engine_config()
    assert f"{option.name} {option.limits}, got {value!r}" in str(refused.value).split("; ")


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        ("WATERMARK", "1.0", "must be a number of at least 0 and below 1, got '1.0'"),
        ("METRICS_PORT", "65536", "must be an integer of at least 0 and at most 65535, got '65536'"),
        ("STALL_SECONDS", "0", "must be a number above 0, got '0'"),
        ("ENFORCE_EAGER", "maybe", "must be true or false, got 'maybe'"),
        ("SPECULATIVE_CONFIG", "[1]", "must be a JSON object, got '[1]'"),
        ("KV_CACHE_MEMORY", "4 pies", "must be a number of bytes, or a number with a unit such as 4GiB, got '4 pies'"),
        ("DECODE_BUCKETS", "1,x", "must be integers separated by commas, got '1,x'"),
    ],
)
def test_an_invalid_variable_is_named_with_what_it_must_be(variable: str, text: str, sentence: str) -> None:
    with pytest.raises(WorkerSettingsError) as refused:
        WorkerSettings.from_env({"HEADRACE_MODEL": "m", f"HEADRACE_{variable}": text})
    assert str(refused.value) == f"HEADRACE_{variable} {sentence}"


def test_all_invalid_variables_are_named_at_once() -> None:
    with pytest.raises(WorkerSettingsError) as refused:
        WorkerSettings.from_env({"HEADRACE_MAX_NUM_SEQS": "0", "HEADRACE_TRACING": "2", "HEADRACE_TENANTS": "a,a"})
    assert [problem.partition(" ")[0] for problem in str(refused.value).split("; ")] == [
        "HEADRACE_MAX_NUM_SEQS",
        "HEADRACE_TRACING",
        "HEADRACE_MODEL",
        "HEADRACE_TENANTS",
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 1 << 20), ("4GiB", 4 << 30), (" 1.5 gib ", 3 << 29), ("2kB", 2000), ("1M", 10**6), (".5mib", 1 << 19)],
)
def test_a_size_is_bytes_or_has_a_unit(text: str, size: int) -> None:
    settings = WorkerSettings.from_env({"HEADRACE_MODEL": "m", "HEADRACE_KV_CACHE_MEMORY": text})
    assert settings.kv_cache_memory == size


def test_an_empty_variable_is_not_set() -> None:
    assert WorkerSettings.from_env({"HEADRACE_MODEL": "m", "HEADRACE_MAX_LORAS": ""}).max_loras == 4


def test_engines_do_not_share_the_default_dictionary() -> None:
    first: Sequence[EngineArgs] = [EngineArgs(model="m"), EngineArgs(model="m")]
    first[0].override_generation_config["top_k"] = 3
    assert first[1].override_generation_config == {}
