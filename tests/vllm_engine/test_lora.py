"""LoRA adapters in vLLM, kept by Headrace's own manager."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.lora_adapters import config_of
from headrace_engine.errors import ConfigError, LoRAError
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.sampling_params import SamplingParams
from vllm_engine.driven_engine import Answer, Case, DrivenEngine

PROMPT = [504, 3575, 282, 4649, 314]
HIDDEN, LAYERS, RANK = 576, 30, 4


def save_adapter(folder: Path, seed: int) -> str:
    """An adapter of the default model's q_proj, strong enough to change what it says."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator) * 0.3
        tensors[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=generator) * 0.3
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps(config_of(["q_proj"], r=RANK)))
    return str(folder)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    return [LoRARequest(name, lora_path=save_adapter(root / name, seed)) for seed, name in enumerate("abc")]


@pytest.fixture(scope="module")
def serving(options: dict[str, Any]) -> Iterator[DrivenEngine]:
    try:
        engine = DrivenEngine(**options, enable_lora=True, max_loras=2, max_cpu_loras=2)
    except ConfigError as error:
        if "applies an adapter to requests without one" not in str(error):
            raise
        pytest.skip(str(error))
    yield engine
    engine.close()


def case(adapter: LoRARequest | None, **given: Any) -> Case:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)
    return Case(PROMPT, params, options={"lora_request": adapter}, **given)


def tokens(answers: list[Answer]) -> list[list[int]]:
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.tokens for answer in answers]


def test_each_request_of_a_batch_has_its_own_adapter(serving: DrivenEngine, adapters: list[LoRARequest]) -> None:
    wanted = [None, *adapters]
    alone = [tokens(serving.run([case(adapter)]))[0] for adapter in wanted]
    assert len({tuple(found) for found in alone}) == len(wanted)
    assert tokens(serving.run([case(adapter) for adapter in wanted])) == alone
    assert {name for step in serving.stats for name in step.lora_requests} <= {"a", "b", "c"}
    assert len(serving.call("list_loras")) == 2
    cut = case(adapters[1], emitted=alone[2][:5])
    assert tokens(serving.run([cut])) == [alone[2][5:]]


def test_an_adapter_that_is_written_anew_is_another_one(serving: DrivenEngine, tmp_path: Path) -> None:
    """Its prompts' K/V are not those of the adapter that was there before, though name and folder are."""
    adapter = LoRARequest("d", lora_path=save_adapter(tmp_path / "d", 10))
    (before,) = tokens(serving.run([case(adapter)]))
    save_adapter(tmp_path / "d", 11)
    assert tokens(serving.run([case(adapter)])) == [before]
    again = LoRARequest("d", lora_path=adapter.lora_path, load_inplace=True)
    assert serving.call("add_lora", again.to_wire()) is True
    assert tokens(serving.run([case(adapter)])) != [before]
    assert serving.call("remove_lora", adapter.lora_int_id) is True
    assert adapter.lora_int_id not in serving.call("list_loras")


def test_an_adapter_that_cannot_be_read_is_refused_and_the_engine_lives(serving: DrivenEngine, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for path in ("/nowhere", str(tmp_path)):
        broken = LoRARequest(f"broken{len(path)}", lora_path=path)
        refused, served = serving.run([case(broken), case(None)])
        assert refused.error is not None and "broken" in refused.error
        assert served.error is None
        with pytest.raises(LoRAError):
            serving.call("add_lora", broken.to_wire())
