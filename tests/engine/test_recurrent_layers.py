"""Layers with recurrent states: how a step is divided for them, that their states survive, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.lora_adapters import make_adapter
from engine.model_families import VOCAB_SIZE
from engine.test_model_families import core_for
from engine.tiny_models import TinyModel, generate_greedily
from headrace_engine import LLM
from headrace_engine.errors import ConfigError, LoRAError
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.recurrent.groups import SequencePart, group, split_at
from headrace_engine.runner.recurrent.recurrent_layers import RecurrentLayer

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/recurrent", "engine/headrace_engine/core/state_slots.py"
)
PROMPT = [(7 * i + 5) % (VOCAB_SIZE - 3) + 3 for i in range(70)]


def part(first_row: int, num_tokens: int, slot: int, *, is_first: bool = False) -> SequencePart:
    return SequencePart(first_row=first_row, num_tokens=num_tokens, is_first=is_first, slot=slot)


def test_sequences_of_equal_length_are_computed_together_and_parts_of_one_after_each_other() -> None:
    long = split_at(part(2, 6, 7, is_first=True), [(4, 9)])
    groups = group([[part(0, 1, 3)], [part(1, 1, 2)], long, [part(8, 4, 1, is_first=True)]])
    found = [(g.rows.tolist(), g.slots, g.is_first, g.snapshots) for g in groups]
    assert found[0] == ([[1], [0]], slice(2, 4), False, [])
    rows, slots, is_first, snapshots = found[1]
    assert (rows, is_first, snapshots) == ([[8, 9, 10, 11], [2, 3, 4, 5]], True, [(7, 9)])
    assert isinstance(slots, torch.Tensor) and slots.tolist() == [1, 7]
    assert found[2] == ([[6, 7]], slice(7, 8), False, [])


def test_a_snapshot_at_the_end_of_a_step_leaves_no_empty_part() -> None:
    (only,) = split_at(part(0, 4, 1), [(4, 5)])
    assert (only.num_tokens, only.snapshot_slot) == (4, 5)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text"])
def test_choices_of_one_prompt_and_later_turns_have_the_tokens_of_transformers(
    tiny_model: Callable[[str], TinyModel], name: str
) -> None:
    model = tiny_model(name)
    core = core_for(Path(model.folder), num_blocks=60, max_num_batched_tokens=200)
    first = model.generate(PROMPT, 20)
    assert generate_greedily(core, [(PROMPT, 20)] * 3) == [first] * 3
    turn = [*PROMPT, *first[:-4]]
    request = EngineCoreRequest(
        request_id="turn",
        prompt_token_ids=turn,
        sampling_params=SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        seed=0,
    )
    core.add_request(request)
    tokens, cached = [], 0
    while core.has_work():
        for output in core.step().outputs:
            tokens += output.new_token_ids
            cached = output.num_cached_tokens
    assert cached == 80, "the last border before the turn's last token"
    assert tokens == model.generate(turn, 6)
    core.check_integrity()


def log_probabilities(folder: str, dtype: str, others: int, step_tokens: int) -> torch.Tensor:
    """Return those of the tokens of PROMPT, computed with other prompts in steps of so many tokens."""
    options: dict[str, Any] = {"num_blocks": 80, "block_size": 16, "max_num_batched_tokens": step_tokens}
    llm = LLM(folder, dtype=dtype, skip_tokenizer_init=True, enable_prefix_caching=False, **options)
    prompts: list[Any] = [{"prompt_token_ids": PROMPT[length:]} for length in range(1, 9 * others, 9)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    *_, output = llm.generate([*prompts, {"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    entries = zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([found[token].logprob for token, found in entries if found is not None])


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "granitemoehybrid"])
def test_bfloat16_loses_no_more_than_in_transformers_alone_among_others_and_in_parts(
    tiny_model: Callable[[str], TinyModel], name: str
) -> None:
    folder = tiny_model(name).folder
    exact = log_probabilities(folder, "float32", 0, 512)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        all_tokens = reference(torch.tensor([PROMPT])).logits[0, :-1].float().log_softmax(dim=-1)
    expected = all_tokens.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    for others, step_tokens in ((0, 512), (0, 24), (5, 512), (5, 24)):
        found = log_probabilities(folder, "bfloat16", others, step_tokens)
        assert (found - exact).std() < 1.5 * (expected - exact).std(), (others, step_tokens)


def test_memory_of_states_is_part_of_the_kv_memory(tiny_model: Callable[[str], TinyModel]) -> None:
    core = core_for(Path(tiny_model("lfm2").folder), kv_cache_memory=1 << 20, max_num_seqs=4)
    layers = [m for m in core.runner._model._model.modules() if isinstance(m, RecurrentLayer)]  # type: ignore[attr-defined]
    slots = sum(states.nbytes for layer in layers for states in layer.states.values())
    assert slots == 8 * core.runner.kv_spec().bytes_per_state
    blocks = core.scheduler.kv.pool.num_usable + 1
    assert slots + blocks * core.runner.kv_spec().bytes_per_block <= 1 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config is set, but Lfm2ForCausalLM has recurrent layers",
        ),
        ({"batch_invariant": True}, "batch_invariant is set, but the recurrent layers of Lfm2ForCausalLM"),
    ],
)
def test_options_that_do_not_fit_recurrent_layers_are_refused(
    tiny_model: Callable[[str], TinyModel], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        core_for(Path(tiny_model("lfm2").folder), num_blocks=20, **options)


def test_a_draft_model_with_recurrent_layers_is_refused(tiny_model: Callable[[str], TinyModel]) -> None:
    draft = {"method": "draft_model", "model": tiny_model("lfm2").folder, "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="has recurrent layers, whose states cannot be taken back"):
        core_for(Path(tiny_model("llama").folder), num_blocks=20, speculative_config=draft)


def test_adapters_work_for_attention_and_are_refused_for_recurrent_layers(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    model = tiny_model("lfm2")
    adapter = make_adapter(model, tmp_path / "good", "good", 1, targets=["q_proj", "v_proj", "w1"])
    inside = make_adapter(model, tmp_path / "bad", "bad", 1, targets=["in_proj"])
    core = core_for(Path(model.folder), num_blocks=60, enable_lora=True)
    with pytest.raises(LoRAError, match="target_modules names 'in_proj'"):
        core.call("add_lora", inside.request.to_wire()).result()
    core.call("add_lora", adapter.request.to_wire()).result()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    core.add_request(
        EngineCoreRequest(
            request_id="a", prompt_token_ids=PROMPT, sampling_params=params, seed=0, lora_request=adapter.request
        )
    )
    tokens = []
    while core.has_work():
        tokens += [token for output in core.step().outputs for token in output.new_token_ids]
    assert tokens == adapter.merged.generate(PROMPT, 8)
    core.shutdown()
