"""docs/engines.md says of vLLM's options and versions what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from headrace_cli.commands.worker import worker
from headrace_engine_vllm import options, versions

PAGE = (Path(__file__).parents[3] / "docs" / "engines.md").read_text(encoding="utf-8")
OPTIONS = PAGE.partition("### Options\n")[2].partition("\n### ")[0]
FLAGS = {flag for option in worker.params for flag in option.opts}


def test_every_flag_of_the_table_is_one_of_the_command() -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", OPTIONS))
    assert len(named) > 20
    assert named <= FLAGS


def test_every_option_that_vllm_has_not_is_in_the_table() -> None:
    (refused,) = re.findall(r"^\| (.*) \| refused, each with the reason", OPTIONS, re.MULTILINE)
    named = {
        name.removeprefix("HEADRACE_").strip("-").replace("-", "_").lower() for name in re.findall(r"`(.+?)`", refused)
    }
    other_values = {name for name in options._OTHER_VALUES if f"--{name.replace('_', '-')}" in refused}
    assert named == {*options._LEFT_OUT, *other_values}


def test_the_supported_versions_are_those_that_are_checked() -> None:
    oldest, newest = versions.OLDEST, versions.NEWEST
    assert f"`>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}`" in PAGE
    assert f"`{versions.ANY_VERSION}=1`" in PAGE


def test_the_version_that_is_installed_is_supported() -> None:
    installed = re.findall(r"pip install vllm(?:-cpu)?==(\S+)", PAGE)
    assert len(installed) == 2
    for version in installed:
        versions.check_version(version, {})
