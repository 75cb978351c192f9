"""Which versions of vLLM are served, and what their draws are called."""

from __future__ import annotations

import pytest

from headrace_engine.errors import ConfigError
from headrace_engine_vllm.versions import check_version, draws_name


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0", "0.32.0+cpu", "0.33.1rc2.dev5+g1234"])
def test_a_supported_version_is_served(version: str) -> None:
    check_version(version, {})


@pytest.mark.parametrize("version", ["0.28.1", "0.34.0", "1.0.0", "dev", ""])
def test_another_version_is_refused_with_both_numbers_and_the_way_out(version: str) -> None:
    with pytest.raises(ConfigError, match=r">=0\.29,<0\.34.*HEADRACE_ENGINE_ANY_VERSION=1") as caught:
        check_version(version, {})
    assert f"vLLM must be >=0.29,<0.34, got {version}:" in str(caught.value)
    check_version(version, {"HEADRACE_ENGINE_ANY_VERSION": "1"})


def test_draws_are_named_by_version_runner_and_device() -> None:
    assert draws_name("0.32.1+cpu", 1, "cpu") == "vllm-0.32-v1-cpu"
    assert draws_name("dev", 2, "cuda") == "vllm-dev-v2-cuda"
