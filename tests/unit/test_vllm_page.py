"""docs/vllm.md says of every public name of vLLM whether it is here, and what to use where it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace_engine import vllm_names
from vllm_api import page as vllm_page


def test_the_page_is_what_the_signatures_say() -> None:
    assert vllm_page.PAGE.read_text() == vllm_page.page(), "write it again: cd tests && python -m vllm_api"


def test_a_name_that_nobody_classified_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads(vllm_page._SIGNATURES.read_text())
    stored["classes"]["EngineArgs"]["fields"].append("brand_new_option")
    stored["classes"]["LLM"]["methods"]["generate"].append("brand_new_argument")
    stored["classes"]["LLMEngine"]["methods"]["brand_new_method"] = []
    path = tmp_path / "signatures.json"
    path.write_text(json.dumps(stored))
    monkeypatch.setattr(vllm_page, "_SIGNATURES", path)
    with pytest.raises(vllm_page.Unclassified) as found:
        vllm_page.page()
    assert (
        str(found.value) == "EngineArgs.brand_new_option, LLM.generate(brand_new_argument), LLMEngine.brand_new_method"
    )


def test_every_value_that_changes_nothing_is_of_an_option_that_is_not_here() -> None:
    for name in " ".join(vllm_names._CHANGING_NOTHING).split():
        assert vllm_names.is_vllms("EngineArgs", name), name
