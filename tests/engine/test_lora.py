"""Requests with adapters generate what transformers generates with the adapter merged into the weights.

Greedy, float32, token for token: several adapters and none in one batch, with chunks, preemptions and cache hits.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.lora_adapters import TinyAdapter, config_of, make_adapter, random_tensors, write_adapter
from engine.tiny_models import VOCAB_SIZE, TinyModel
from headrace_engine import LLM, AsyncEngineArgs, AsyncLLMEngine, LoRARequest, SamplingParams
from headrace_engine.api.llm_engine import LLMEngine
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.errors import InvalidRequestError, LoRAError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/lora",
    "engine/headrace_engine/runner/linear",
    "engine/headrace_engine/runner/models",
    "engine/headrace_engine/core/lora_manager.py",
    "tests/engine/lora_adapters.py",
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="session")
def adapters(llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyAdapter]:
    """Adapters of the tiny Llama that differ in everything that an adapter may."""
    folder = tmp_path_factory.mktemp("adapters")
    settings: dict[str, dict[str, Any]] = {
        "attention": {"targets": ATTENTION},
        "stable": {"targets": [*ATTENTION, *MLP], "r": 8, "lora_alpha": 4, "use_rslora": True},
        "patterned": {
            "targets": ["q_proj", "down_proj", "lm_head"],
            "rank_pattern": {"layers.0.self_attn.q_proj": 2, "down_proj": 6},
            "alpha_pattern": {"layers.1.mlp.down_proj": 20},
        },
    }
    return {
        name: make_adapter(llama, folder / name, name, seed, **own) for seed, (name, own) in enumerate(settings.items())
    }


class Workload:
    """24 requests, each with one of the adapters or none; all share a prefix of 32 tokens."""

    def __init__(self, base: TinyModel, adapters: dict[str, TinyAdapter]) -> None:
        draw = random.Random(3)
        prefix = [draw.randrange(3, VOCAB_SIZE) for _ in range(32)]
        self.messages: list[EngineCoreRequest] = []
        self.expected: dict[str, list[int]] = {}
        for index in range(24):
            adapter = [None, *adapters.values()][index % (len(adapters) + 1)]
            prompt = [*prefix, *(draw.randrange(3, VOCAB_SIZE) for _ in range(draw.choice([1, 3, 16, 30])))]
            max_tokens = draw.choice([1, 6, 13])
            self.messages.append(
                EngineCoreRequest(
                    request_id=str(index),
                    prompt_token_ids=prompt,
                    sampling_params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
                    seed=0,
                    lora_request=adapter.request if adapter else None,
                )
            )
            self.expected[str(index)] = (adapter.merged if adapter else base).generate(prompt, max_tokens)


@pytest.fixture(scope="session")
def workload(llama: TinyModel, adapters: dict[str, TinyAdapter]) -> Workload:
    return Workload(llama, adapters)


def run(model: TinyModel, workload: Workload, *, steps_between: int = 0, **options: Any) -> tuple[int, int]:
    """Returns how many preemptions and cache-hit tokens there were."""
    args = {"dtype": "float32", "block_size": 16, "num_blocks": 150, "max_model_len": 112, **options}
    config = EngineArgs(model=model.folder, enable_lora=True, **args).create_engine_config()
    core = EngineCore(config, create_runner(config))
    tokens: dict[str, list[int]] = {}
    preemptions = hit_tokens = 0

    def step() -> None:
        nonlocal preemptions, hit_tokens
        result = core.step()
        core.check_integrity()
        preemptions += result.stats.preemptions
        hit_tokens += result.stats.prefix_hit_tokens
        for news in result.outputs:
            assert news.error is None
            tokens.setdefault(news.request_id, []).extend(news.new_token_ids)

    for request in {m.lora_request for m in workload.messages if m.lora_request}:
        core.call("add_lora", request.to_wire()).result()
    for message in workload.messages:
        core.add_request(message)
        for _ in range(steps_between):
            step()
    while core.has_work():
        step()
    core.shutdown()
    assert tokens == workload.expected
    return preemptions, hit_tokens


def test_adapters_change_what_is_generated(workload: Workload, llama: TinyModel) -> None:
    with_adapter = [message for message in workload.messages if message.lora_request]
    changed = sum(
        workload.expected[m.request_id] != llama.generate(m.prompt_token_ids, len(workload.expected[m.request_id]))
        for m in with_adapter
    )
    assert changed >= 0.9 * len(with_adapter)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_batch_of_three_adapters_and_none_generates_what_each_does_alone(
    llama: TinyModel, workload: Workload, backend: str
) -> None:
    assert run(llama, workload, max_loras=3, attention_backend=backend, enable_prefix_caching=False) == (0, 0)


def test_prompts_in_chunks_give_the_same_tokens(llama: TinyModel, workload: Workload) -> None:
    run(llama, workload, max_loras=3, max_num_batched_tokens=7, enable_prefix_caching=False)


def test_preempted_requests_go_on_under_their_adapter(llama: TinyModel, workload: Workload) -> None:
    preemptions, _ = run(llama, workload, max_loras=3, num_blocks=15, enable_prefix_caching=False)
    assert preemptions >= 3


def test_cached_prefixes_are_those_of_the_same_adapter(llama: TinyModel, workload: Workload) -> None:
    _, hit_tokens = run(llama, workload, max_loras=3, steps_between=1)
    assert hit_tokens >= 20 * 32


def test_one_adapter_at_a_time_with_chunks_preemptions_and_hits(llama: TinyModel, workload: Workload) -> None:
    options = {"num_blocks": 13, "max_num_batched_tokens": 19, "max_num_seqs": 7}
    _, hit_tokens = run(llama, workload, max_loras=1, max_cpu_loras=3, **options)
    assert hit_tokens >= 48


def test_drafts_are_verified_under_the_requests_adapter(llama: TinyModel, workload: Workload) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    run(llama, workload, max_loras=3, speculative_config=speculative)
    run(
        llama,
        workload,
        max_loras=3,
        speculative_config={"method": "draft_model", "model": llama.folder, "num_speculative_tokens": 3},
    )


def test_less_room_than_adapters_only_costs_time(llama: TinyModel, workload: Workload) -> None:
    config = EngineArgs(
        model=llama.folder, enable_lora=True, dtype="float32", block_size=16, num_blocks=100
    ).create_engine_config()
    with LLMEngine(config) as engine:
        for message in workload.messages[:12]:
            engine.add_request(
                message.request_id, message.prompt_token_ids, message.sampling_params, lora_request=message.lora_request
            )
        found = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = output.outputs[0].token_ids
        assert len(engine.list_loras()) == 1
    assert found == {message.request_id: workload.expected[message.request_id] for message in workload.messages[:12]}


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("gpt2", ["c_attn", "c_fc", "mlp.c_proj"]),
        ("opt", ["q_proj", "v_proj", "fc1", "fc2"]),
        ("gemma2", ATTENTION),
    ],
)
def test_other_architectures_and_transposed_layers(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path, name: str, targets: list[str]
) -> None:
    model = tiny_model(name)
    adapters = {"x": make_adapter(model, tmp_path / "x", "x", seed=1, targets=targets)}
    run(model, Workload(model, adapters))


def test_a_batch_without_adapters_runs_the_model_as_it_was_loaded(
    llama: TinyModel, adapters: dict[str, TinyAdapter]
) -> None:
    llm = LLM(llama.folder, dtype="float32", num_blocks=80, enable_lora=True)
    model = llm.engine._core.core.runner._model._model  # type: ignore[attr-defined]
    hooked = [name for name, module in model.named_modules() if module._forward_hooks]
    assert hooked == []
    llm.generate("mill", GREEDY, use_tqdm=False, lora_request=adapters["attention"].request)
    assert any(module._forward_hooks for module in model.modules())
    llm.generate("mill", GREEDY, use_tqdm=False)
    assert not any(module._forward_hooks for module in model.modules())


# -- public classes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(llama: TinyModel) -> Iterator[LLM]:
    made = LLM(llama.folder, dtype="float32", num_blocks=80, block_size=16, enable_lora=True, max_loras=2)
    yield made
    made.close()


def texts(llm: LLM, lora: Any, count: int = 2) -> list[str]:
    outputs = llm.generate(["the wheel turns"] * count, GREEDY, use_tqdm=False, lora_request=lora)
    return [output.outputs[0].text for output in outputs]


def test_generate_takes_one_adapter_for_all_prompts_or_one_for_each(llm: LLM, adapters: dict[str, TinyAdapter]) -> None:
    one, other = adapters["attention"].request, adapters["stable"].request
    mixed = texts(llm, [one, None, other], count=3)
    assert len(set(mixed)) == 3
    assert texts(llm, one) == [mixed[0]] * 2
    assert texts(llm, None) == [mixed[1]] * 2
    with pytest.raises(InvalidRequestError, match="2 prompts came with 1 LoRA requests"):
        texts(llm, [one])


def test_chat_and_several_choices_run_under_the_adapter(llm: LLM, adapters: dict[str, TinyAdapter]) -> None:
    lora = adapters["stable"].request
    messages = [{"role": "user", "content": "hello"}]
    with_adapter, without = (llm.chat(messages, GREEDY, use_tqdm=False, lora_request=own) for own in (lora, None))
    assert with_adapter[0].outputs[0].token_ids != without[0].outputs[0].token_ids
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    several = llm.generate("hello", params, use_tqdm=False, lora_request=lora)[0].outputs
    first = llm.generate(
        "hello", SamplingParams(seed=5, max_tokens=6, ignore_eos=True), use_tqdm=False, lora_request=lora
    )
    assert several[0].token_ids == first[0].outputs[0].token_ids
    assert len(several) == 3


def test_prompt_logprobs_are_those_of_the_adapter_also_where_it_changes_the_output_head(
    llm: LLM, adapters: dict[str, TinyAdapter], llama: TinyModel
) -> None:
    prompts = [[5, 6, 7, 8, 9], [40, 41, 42]]
    models = [adapters["patterned"].merged, llama]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=[adapters["patterned"].request, None])
    for prompt, model, output in zip(prompts, models, outputs, strict=True):
        with torch.inference_mode():
            expected = model.reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert output.prompt_logprobs is not None
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            token = prompt[position + 1]
            assert entry[token].logprob == pytest.approx(float(expected[position, token]), abs=1e-3)


def test_adapters_are_added_listed_named_without_their_path_and_removed(
    llm: LLM, adapters: dict[str, TinyAdapter]
) -> None:
    for known in llm.list_loras():
        llm.remove_lora(known)
    sql = LoRARequest("sql", 7, str(adapters["attention"].folder))
    assert llm.add_lora(sql)
    assert llm.pin_lora(7)
    assert llm.list_loras() == {7}
    assert texts(llm, LoRARequest("sql", 7)) == texts(llm, adapters["attention"].request)
    assert llm.remove_lora(7)
    assert not llm.remove_lora(7)
    with pytest.raises(LoRAError, match="'sql' is not loaded"):
        texts(llm, LoRARequest("sql", 7))


def test_an_adapter_that_cannot_be_served_is_refused_before_anything_is_computed(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(LoRAError, match="'gone': its folder does not exist"):
        texts(llm, LoRARequest("gone", lora_path=str(tmp_path / "gone")))
    assert not llm.engine.has_unfinished_requests()


def test_an_engine_without_adapters_says_so(llama: TinyModel, adapters: dict[str, TinyAdapter]) -> None:
    plain = LLM(llama.folder, dtype="float32", num_blocks=80)
    with pytest.raises(LoRAError, match="enable_lora is not set"):
        texts(plain, adapters["attention"].request)
    plain.close()


@pytest.fixture(params=[True, False], ids=["in process", "child"])
async def engine(llama: TinyModel, request: pytest.FixtureRequest) -> AsyncIterator[AsyncLLMEngine]:
    args = AsyncEngineArgs(
        model=llama.folder,
        dtype="float32",
        num_blocks=80,
        block_size=16,
        enable_lora=True,
        max_loras=2,
        core_in_process=request.param,
    )
    made = AsyncLLMEngine.from_engine_args(args)
    yield made
    await made.shutdown()


async def test_adapters_come_and_go_while_others_run(
    engine: AsyncLLMEngine, adapters: dict[str, TinyAdapter], llama: TinyModel
) -> None:
    async def generate(name: str, max_tokens: int, lora: LoRARequest | None) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        last = None
        async for output in engine.generate([5, 6, 7], params, name, lora_request=lora):
            last = output
        assert last is not None
        return last.outputs[0].token_ids

    one, other = adapters["attention"], adapters["stable"]
    assert await engine.add_lora(one.request)
    plain = asyncio.create_task(generate("plain", 120, None))
    running = asyncio.create_task(generate("running", 100, one.request))
    await asyncio.sleep(0)
    late = asyncio.create_task(generate("late", 40, other.request))
    assert await late == other.merged.generate([5, 6, 7], 40)
    assert await engine.list_loras() == {one.request.lora_int_id, other.request.lora_int_id}
    assert await engine.remove_lora(one.request.lora_int_id)
    assert await engine.list_loras() == {other.request.lora_int_id}
    assert await running == one.merged.generate([5, 6, 7], 100)
    assert await plain == llama.generate([5, 6, 7], 120)
    assert await engine.pin_lora(other.request.lora_int_id)
    with pytest.raises(LoRAError, match="not loaded"):
        await generate("gone", 4, LoRARequest(one.name))


# -- folders --------------------------------------------------------------------------------------------------------


def test_an_adapter_that_peft_saved_is_read_as_peft_reads_it(llama: TinyModel, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(7)
    base = copy.deepcopy(llama.reference)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=24,
        use_rslora=True,
        target_modules=["q_proj", "up_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 8},
        alpha_pattern={"up_proj": 12},
        init_lora_weights="gaussian",
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    wrapped.save_pretrained(tmp_path / "saved")
    adapter = TinyAdapter("saved", tmp_path / "saved", TinyModel("saved", llama.folder, wrapped.merge_and_unload()))
    run(llama, Workload(llama, {"saved": adapter}))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("DoRA", {"use_dora": True}, "use_dora is set: DoRA is not supported"),
    ("saved modules", {"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
    ("biases", {"bias": "all"}, "bias must be 'none'.*, got 'all'"),
    ("another method", {"peft_type": "LOHA"}, "peft_type must be 'LORA', got 'LOHA'"),
    ("changed base", {"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ("unknown module", {"target_modules": ["q_proj", "flux_proj"]}, "'flux_proj', which is not a linear layer"),
    ("absent weights", {"target_modules": ["q_proj", "v_proj", "o_proj"]}, "'o_proj', but adapter_model.safetensors"),
    ("rank", {"r": 17}, "q_proj has rank 17, the limit is max_lora_rank=16"),
    ("rank that is not the tensors'", {"r": 3}, r"lora_A of .*q_proj must have the shape \[3, 64\], got \[4, 64\]"),
    ("no rank", {"r": 0}, "r must be an integer of at least 1, got 0"),
    ("no alpha", {"lora_alpha": "high"}, "lora_alpha must be a number, got 'high'"),
    ("regular expression", {"rank_pattern": {r".*\d": 4}}, "only plain module names"),
]


def edit(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    if how == "shape":
        tensors[name] = torch.zeros(4, 65)
    elif how == "missing":
        del tensors[name]
    elif how == "infinite":
        tensors[name][0, 0] = float("inf")
    elif how == "foreign":
        tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 64)
    elif how == "embedding":
        tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 384)
    else:
        tensors["base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight"] = torch.zeros(4, 64)
    return tensors


@pytest.mark.parametrize(("settings", "words"), [(own, words) for _, own, words in WRONG], ids=[n for n, _, _ in WRONG])
def test_a_config_that_cannot_be_served_is_refused_by_name(
    llm: LLM, llama: TinyModel, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    config = config_of(["q_proj", "v_proj"])
    write_adapter(tmp_path / "x", {**config, **settings}, random_tensors(llama.reference, config, 1))
    before = llm.list_loras()
    with pytest.raises(LoRAError, match=words):
        llm.add_lora(LoRARequest("x", lora_path=str(tmp_path / "x")))
    assert llm.list_loras() == before


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", r"lora_A of model.layers.0.self_attn.q_proj must have the shape \[4, 64\], got \[4, 65\]"),
        ("missing", "model.layers.0.self_attn.q_proj has no lora_A"),
        ("infinite", "model.layers.0.self_attn.q_proj hold infinite values"),
        ("foreign", "model.layers.9.self_attn.q_proj is not a linear layer of this model"),
        ("embedding", "embed_tokens.lora_embedding_A is not the lora_A or lora_B"),
        ("experts", "experts.3.up_proj lies inside a mixture of experts"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_the_modules_name(
    llm: LLM, llama: TinyModel, tmp_path: Path, how: str, words: str
) -> None:
    config = config_of(["q_proj", "v_proj"])
    write_adapter(tmp_path / "x", config, edit(random_tensors(llama.reference, config, 1), how))
    with pytest.raises(LoRAError, match=words):
        llm.add_lora(LoRARequest("x", lora_path=str(tmp_path / "x")))


def test_files_that_are_missing_broken_or_pickles_are_refused(llm: LLM, llama: TinyModel, tmp_path: Path) -> None:
    request = LoRARequest("x", lora_path=str(tmp_path))
    config = config_of(["q_proj"])

    def refusal() -> str:
        with pytest.raises(LoRAError) as refused:
            llm.add_lora(request)
        assert str(tmp_path) not in str(refused.value)
        return str(refused.value)

    assert "holds no adapter_config.json" in refusal()
    write_adapter(tmp_path, config, random_tensors(llama.reference, config, 1))
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    assert "adapter_model.safetensors cannot be read: SafetensorError" in refusal()
    weights.rename(tmp_path / "adapter_model.bin")
    assert "pickle and never read" in refusal()
    (tmp_path / "adapter_model.bin").unlink()
    assert "holds no adapter_model.safetensors" in refusal()
    for text in ("{", "[1]", "[" * 100_000):
        (tmp_path / "adapter_config.json").write_text(text)
        assert "adapter_config.json" in refusal()


def test_all_that_is_wrong_is_named_at_once(llm: LLM, llama: TinyModel, tmp_path: Path) -> None:
    config = config_of(["q_proj", "v_proj"])
    tensors = edit(random_tensors(llama.reference, config, 1), "shape")
    write_adapter(tmp_path / "x", {**config, "use_dora": True, "bias": "lora_only"}, tensors)
    with pytest.raises(LoRAError) as refused:
        llm.add_lora(LoRARequest("x", lora_path=str(tmp_path / "x")))
    assert len(refused.value.problems) == 3
