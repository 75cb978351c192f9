"""Programs written for vLLM, with only the import changed: what they call works, or is refused by a sentence."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm

from engine.tiny_models import TinyModel
from headrace_engine import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from headrace_engine.api.metrics import Counter, Gauge
from headrace_engine.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    HeadraceEngineError,
    InvalidRequestError,
    ModelLoadError,
)
from headrace_engine.requests.outputs import Logprob
from headrace_engine.requests.sampling_params import RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ROOM: dict[str, Any] = {"dtype": "float32", "num_blocks": 80, "block_size": 16}
UUID = uuid.UUID(int=7)


@pytest.fixture(scope="module")
def llm(llama: TinyModel) -> Iterator[LLM]:
    made = LLM(llama.folder, **ROOM)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def engine(llm: LLM) -> LLMEngine:
    return llm.llm_engine


@pytest.fixture
async def streams(llama: TinyModel) -> Any:
    made = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(llama.folder, core_in_process=True, **ROOM))
    yield made
    await made.shutdown()


def run(engine: LLMEngine) -> list[Any]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


# -- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, -3, "a", UUID, uuid.UUID(int=2**128 - 1), 2**64 - 1, np.int64(5)], ids=repr)
def test_whatever_names_a_request_is_known_by_its_text(engine: LLMEngine, given: Any) -> None:
    assert engine.add_request(given, [1, 2], GREEDY) == str(given)
    with pytest.raises(DuplicateRequestError):
        engine.add_request(str(given), [1, 2], GREEDY)
    assert run(engine)[-1].request_id == str(given)
    engine.add_chat_request(given, [{"role": "user", "content": "a"}], GREEDY)
    aborted = engine.abort(given)
    assert aborted is not None
    assert aborted.outputs[0].finish_reason == "abort"


def test_several_requests_are_aborted_by_their_ids(engine: LLMEngine) -> None:
    for name in (1, "2", UUID):
        engine.add_request(name, [1, 2], GREEDY)
    engine.abort_request([1, UUID])
    engine.abort_request("2")
    assert not engine.has_unfinished_requests()
    engine.abort_request([1, "unknown"])


WRONG_IDS = ["", None, True, 1.5, b"a", ["a"], object(), "\ud800", 2**64, -(2**63) - 1, 10**5000]


@pytest.mark.parametrize("given", WRONG_IDS, ids=lambda given: type(given).__name__)
def test_what_names_no_request_is_refused(engine: LLMEngine, given: Any) -> None:
    for call in (lambda: engine.add_request(given, [1], GREEDY), lambda: engine.abort(given)):
        with pytest.raises(InvalidRequestError, match="request_id"):
            call()


async def test_a_stream_may_have_a_number_or_a_uuid_for_its_id(streams: AsyncLLMEngine) -> None:
    for given in (0, UUID):
        outputs = [output async for output in streams.generate([1, 2], GREEDY, given)]
        assert outputs[-1].request_id == str(given)
        async for output in streams.generate([1, 2], SamplingParams(max_tokens=60, ignore_eos=True), given):
            last = output
            await streams.abort(given)
        assert last.outputs[0].finish_reason == "abort"
    first = streams.generate([1, 2], SamplingParams(max_tokens=60, ignore_eos=True), 0)
    await anext(aiter(first))
    with pytest.raises(DuplicateRequestError):
        await anext(aiter(streams.generate([1, 2], GREEDY, "0")))
    await streams.abort([0, "unknown"])
    for wrong in WRONG_IDS:
        with pytest.raises(InvalidRequestError, match="request_id"):
            await anext(aiter(streams.generate([1, 2], GREEDY, wrong)))


# -- prompts and parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", ["a mill", [3, 4], (3, 4), np.array([3, 4]), torch.tensor([3, 4]), {"prompt": "a"}])
def test_one_prompt_needs_no_list(llm: LLM, one: Any) -> None:
    assert len(llm.generate(one, GREEDY, use_tqdm=False)) == 1


@pytest.mark.parametrize(
    "two",
    [
        ["a", "b"],
        ("a", "b"),
        [[3], [4]],
        np.array([[3], [4]]),
        np.array(["a", "b"]),
        (text for text in "ab"),
        {"a": 1, "b": 2}.keys(),
        [np.array([3]), torch.tensor([4])],
    ],
    ids=lambda two: type(two).__name__,
)
def test_prompts_may_come_in_any_list(llm: LLM, two: Any) -> None:
    assert len(llm.generate(two, GREEDY, use_tqdm=False)) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prompts": None}, "prompts must be one or a list of them, got a NoneType"),
        ({"prompts": b"a"}, "prompts must be one or a list of them, got a bytes"),
        ({"prompts": {"a"}}, "prompts must be one or a list of them, got a set"),
        ({"prompts": 5}, "prompts must be one or a list of them, got a int"),
        ({"sampling_params": {"n": 1}}, "sampling params must be SamplingParams, or a list of them, got a dict"),
        ({"sampling_params": [GREEDY] * 2}, "1 prompts came with 2 sampling params"),
        ({"sampling_params": [{"n": 1}]}, "sampling parameters must be SamplingParams, got a dict"),
        ({"priority": "high"}, "priorities must be int, or a list of them, got a str"),
        ({"priority": [1, 2]}, "1 prompts came with 2 priorities"),
        ({"priority": [1.5]}, "priority must be an integer of 64 bits, got 1.5"),
        ({"lora_request": "sql"}, "LoRA requests must be LoRARequest, or a list of them, got a str"),
        ({"tokenization_kwargs": {"a": 1}}, "tokenization_kwargs is {'a': 1}, but it is not supported"),
        (
            {"mm_processor_kwargs": {"a": 1}},
            "mm_processor_kwargs is {'a': 1}, but it is not supported: docs/vllm.md says",
        ),
    ],
)
def test_a_wrong_argument_is_refused(llm: LLM, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        llm.generate(**{"prompts": ["a"], "use_tqdm": False, **arguments})
    assert sentence in str(refused.value)
    assert not llm.llm_engine.has_unfinished_requests()


def test_priorities_may_be_left_open(llm: LLM) -> None:
    assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=None)) == 2
    assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=np.array([1, 0]))) == 2
    assert len(llm.generate("a", [None], use_tqdm=False)) == 1  # type: ignore[list-item]


def test_a_progress_bar_may_be_made_by_the_caller(llm: LLM) -> None:
    assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=partial(tqdm, disable=True))) == 2


# -- chats -------------------------------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "grind", "parameters": {"type": "object"}}}]
SHOWS_ALL = (
    "{% for m in messages %}<{{ m.role }}|{{ m.name }}|{{ m.tool_call_id }}>{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.function.name }}({{ c.function.arguments | tojson }})]{% endfor %}{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}{{ mood }}{% if add_generation_prompt %}!{% endif %}"
)


def prompt_of(llm: LLM, messages: Any, *args: Any, **options: Any) -> str:
    (output,) = llm.chat(messages, GREEDY, *args, **{"use_tqdm": False, **options} if not args else options)
    assert output.prompt is not None
    return output.prompt


def test_contents_may_be_lists_of_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "one"}, "two", {"type": "input_text", "text": "three"}]
    assert prompt_of(llm, [{"role": "user", "content": parts}]) == "<|user|>one\ntwo\nthree<eos><|assistant|>"


def test_a_template_that_loops_over_contents_gets_them_as_parts(llm: LLM) -> None:
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ["a", "b"]}]
    assert prompt_of(llm, messages, chat_template=template) == "[text:hi][text:a][text:b]"
    flat = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert prompt_of(llm, messages, chat_template=flat) == "hia\nb"
    parts = prompt_of(llm, HI, chat_template=flat, chat_template_content_format="openai")
    assert parts == "[{'type': 'text', 'text': 'hi'}]"


def test_tools_calls_and_their_results_reach_the_template(llm: LLM) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "grind", "arguments": '{"grain": "rye"}'}}
    bad = {"function": {"name": "stop", "arguments": "{oops"}}
    messages = [
        {"role": "user", "content": "flour!", "name": "miller"},
        {"role": "assistant", "content": None, "tool_calls": [call, bad]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
    ]
    shown = prompt_of(llm, messages, chat_template=SHOWS_ALL, tools=TOOLS, chat_template_kwargs={"mood": " glad"})
    assert shown == '<user|miller|>flour!<assistant||>[grind({"grain": "rye"})][stop({})]<tool||1>done1 tools glad!'
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"grain": "rye"}'  # type: ignore[index]


def test_the_last_message_may_be_continued(llm: LLM) -> None:
    messages = [*HI, {"role": "assistant", "content": "the wheel "}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt_of(llm, messages, **options) == "<|user|>hi<eos><|assistant|>the wheel "
    assert prompt_of(llm, HI, add_generation_prompt=False) == "<|user|>hi<eos>"


def test_the_arguments_of_a_chat_have_vllms_order(llm: LLM) -> None:
    assert prompt_of(llm, HI, False, None, None, "{{ messages[0].content }}") == "hi"


def test_a_template_may_be_given_to_the_engine_as_a_file(llama: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("from a file: {{ messages[0].content }}")
    with_file = LLM(llama.folder, chat_template=path, **ROOM)
    assert prompt_of(with_file, HI) == "from a file: hi"
    with_file.shutdown()
    with pytest.raises(InvalidRequestError, match="chat_template is no template, and no file that can be read"):
        LLM(llama.folder, chat_template=str(tmp_path / "none.jinja"), **ROOM)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"continue_final_message": True}, "exclude each other: set add_generation_prompt=False"),
        ({"add_generation_prompt": 1}, "add_generation_prompt must be true or false, got 1"),
        ({"tools": "grind"}, "tools must be a list of maps that describe functions"),
        ({"tools": [print]}, "tools must be a list of maps that describe functions"),
        ({"tools": [{"a": object()}]}, "tools must hold only numbers, strings, lists and maps, got"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs holds messages, which is no variable"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs holds tokenize, which is no variable"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be a map from names to values"),
        ({"chat_template_kwargs": {"a": 2**70}}, "must hold integers of 64 bits"),
        ({"chat_template": 5}, "chat_template must be the text of a template, got 5"),
        ({"chat_template": "{% nonsense %}"}, "the given chat template refuses these messages"),
        ({"chat_template_content_format": "xml"}, "must be one of auto, string, openai"),
        ({"messages": HI[0]}, "messages must be a list of messages, got one map: put it into a list"),
        ({"messages": "hi"}, "messages must be a list with at least one message"),
        ({"messages": 5}, "messages must be one or a list of them, got a int"),
        (
            {"messages": [{"role": "assistant"}], "add_generation_prompt": False, "continue_final_message": True}
            | {"chat_template": "no messages"},
            "continue_final_message cannot be served",
        ),
    ],
)
def test_what_makes_no_chat_is_refused(llm: LLM, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        llm.chat(**{"messages": HI, "use_tqdm": False, **options})
    assert sentence in str(refused.value)


async def test_chat_options_are_those_of_streams_and_steps_too(streams: AsyncLLMEngine, engine: LLMEngine) -> None:
    options: dict[str, Any] = {"chat_template": SHOWS_ALL, "tools": TOOLS, "add_generation_prompt": False}
    outputs = [output async for output in streams.chat(HI, GREEDY, 0, **options)]
    engine.add_chat_request(0, HI, GREEDY, **options)
    assert outputs[-1].prompt == run(engine)[-1].prompt == "<user||>hi1 tools"
    with pytest.raises(InvalidRequestError, match="'tolls' is not known; did you mean tools"):
        engine.add_chat_request(0, HI, GREEDY, tolls=TOOLS)


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_a_choice_tells_the_sum_of_its_log_probabilities(engine: LLMEngine) -> None:
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, output_kind=kind)
        engine.add_request("a", [1, 2], params)
        outputs = run(engine)
        whole = outputs if kind is RequestOutputKind.DELTA else outputs[-1:]
        entries = [entry for output in whole for entry in output.outputs[0].logprobs]
        tokens = [token for output in whole for token in output.outputs[0].token_ids]
        expected = sum(entry[token].logprob for token, entry in zip(tokens, entries, strict=True))
        assert outputs[-1].outputs[0].cumulative_logprob == pytest.approx(expected)
    engine.add_request("a", [1, 2], GREEDY)
    assert run(engine)[-1].outputs[0].cumulative_logprob is None


def test_an_output_tells_when_what_happened(llm: LLM) -> None:
    (output,) = llm.generate([[1, 2]], SamplingParams(n=2, max_tokens=3, ignore_eos=True), use_tqdm=False)
    stats = output.metrics
    assert stats is not None
    assert stats.num_generation_tokens == 6
    assert stats.arrival_time > 1e9
    assert 0 < stats.queued_ts <= stats.scheduled_ts < stats.first_token_ts <= stats.last_token_ts
    assert stats.first_token_latency == stats.first_token_ts - stats.queued_ts
    assert (output.lora_request, output.outputs[0].lora_request) == (None, None)


def test_a_log_probability_is_made_by_position() -> None:
    assert Logprob(-0.5, 1, "x") == Logprob(logprob=-0.5, rank=1, decoded_token="x")
    assert (Logprob(-0.5).rank, Logprob(-0.5).decoded_token) == (None, None)


def test_metrics_are_counted(llm: LLM) -> None:
    def values() -> dict[str, float]:
        found = [metric for metric in llm.get_metrics() if isinstance(metric, Counter | Gauge)]
        return {metric.name.removeprefix("vllm:"): metric.value for metric in found}

    before = values()
    llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    after = values()
    assert after["generation_tokens"] - before["generation_tokens"] == 4
    assert after["prompt_tokens"] - before["prompt_tokens"] == 3
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0


def test_the_prefix_cache_is_forgotten_when_it_is_told(llm: LLM) -> None:
    def cached() -> int:
        (output,) = llm.generate([[*range(3, 40)]], GREEDY, use_tqdm=False)
        return output.num_cached_tokens

    cached()
    assert cached() == 32
    assert llm.reset_prefix_cache() is True
    assert cached() == 0
    llm.llm_engine.add_request("running", [1, 2], GREEDY)
    llm.llm_engine.step()
    assert llm.reset_prefix_cache() is False
    run(llm.llm_engine)
    llm.llm_engine._core.core.check_integrity()  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match="reset_running_requests is True, but it is not supported"):
        llm.reset_prefix_cache(reset_running_requests=True)


def test_the_tokenizer_is_transformers_own(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("the mill")).endswith("the mill")
    assert tokenizer.apply_chat_template(HI, tokenize=False) == "<|user|>hi<eos>"


# -- options -----------------------------------------------------------------------------------------------------------


def test_options_go_by_vllms_names(llama: TinyModel) -> None:
    made = LLM(
        model=llama.folder,
        tokenizer=llama.folder,
        revision="main",
        seed=0,
        dtype=torch.float32,
        max_model_len=-1,
        enforce_eager=True,
        kv_cache_memory_bytes=2**20,
        disable_log_stats=False,
        gpu_memory_utilization=0.9,
        trust_remote_code=False,
        enable_chunked_prefill=True,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        swap_space=4,
        hf_overrides={},
        limit_mm_per_prompt=None,
    )
    first = made.generate(["a"] * 2, SamplingParams(max_tokens=8), use_tqdm=False)
    made.close()
    again = LLM(llama.folder, seed=0, **ROOM)
    second = again.generate(["a"] * 2, SamplingParams(max_tokens=8), use_tqdm=False)
    again.close()
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in (first, second)]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != tokens[0][1]


def test_an_engines_options_can_be_handed_on(llama: TinyModel) -> None:
    args = EngineArgs(llama.folder, **ROOM)
    streaming = vars(AsyncEngineArgs(llama.folder, **ROOM))
    for made in (LLM(**vars(args)), LLM(**asdict(args)), LLM.from_engine_args(args), LLM(**streaming)):
        assert made.llm_engine.model_info.dtype == "float32"
        made.close()


def test_options_that_are_no_engine_args_are_refused(llama: TinyModel) -> None:
    for door in (LLM, LLMEngine, AsyncLLMEngine):
        with pytest.raises(ConfigError, match="engine_args must be EngineArgs, got a dict"):
            door.from_engine_args({"model": llama.folder})  # type: ignore[attr-defined]


async def test_a_stream_tells_its_default_parameters(streams: AsyncLLMEngine, engine: LLMEngine) -> None:
    assert streams.get_default_sampling_params() == engine.get_default_sampling_params()


def test_a_length_of_minus_one_is_what_memory_holds(llama: TinyModel) -> None:
    fitting = LLM(llama.folder, max_model_len=-1, dtype="float32", num_blocks=4, block_size=16)
    assert fitting.llm_engine.model_info.max_model_len == 48
    assert len(fitting.generate([[1] * 47], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 1
    fitting.close()
    with pytest.raises(ConfigError, match="give more KV memory or lower max_model_len"):
        LLM(llama.folder, dtype="float32", num_blocks=4, block_size=16)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "half"}, "dtype must be one of auto, float32, bfloat16, got 'half'"),
        ({"dtype": "half", "device": "tpu"}, "got 'tpu'"),
        ({"logits_processors": [3]}, "logits_processors must be import paths or subclasses of LogitsProcessor, got 3"),
        (
            {"logits_processors": ["a:B", None]},
            "logits_processors must be import paths or subclasses of LogitsProcessor, got None",
        ),
        ({"dtype": torch.float16}, "dtype must be one of auto, float32, bfloat16, got torch.float16"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization is 0.5, but it is not supported: docs/vllm.md says"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory must be an integer of at least 1, got 0"),
        ({"kv_cache_memory_bytes": 1, "kv_cache_memory": 2}, "give one of them"),
        ({"max_modell_len": 5}, "'max_modell_len' is not known; did you mean max_model_len?"),
        ({"max_model_len": "1k"}, "max_model_len must be an integer of at least 1, got '1k'"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill is False, but it is not supported"),
        ({"limit_mm_per_prompt": {"image": 1}}, "limit_mm_per_prompt is {'image': 1}, but it is not supported"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, but it is not supported"),
        ({"seed": "x"}, "seed must be an integer of 64 bits, got 'x'"),
        ({"tokenizer": 5}, "tokenizer must be text that is not empty, got 5"),
        ({"enable_lora": "yes"}, "enable_lora must be true or false, got 'yes'"),
        ({"model": None}, "model must be a model folder or a hub name, got None"),
    ],
)
def test_an_option_that_cannot_be_served_is_refused_with_what_to_use(options: dict[str, Any], sentence: str) -> None:
    for kind in (EngineArgs, AsyncEngineArgs):
        with pytest.raises(ConfigError) as refused:
            kind(**{"model": "m", **options}).create_engine_config()
        assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("best_of", "best_of is 5, but it is not supported: docs/vllm.md says what to use instead"),
        ("thinking_token_budget", "thinking_token_budget is 5, but it is not supported"),
        ("temprature", "'temprature' is not known; did you mean temperature?"),
    ],
)
def test_a_parameter_that_is_not_here_is_refused_with_what_to_use(name: str, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**{name: 5})
    assert sentence in str(refused.value)
    assert SamplingParams(skip_clone=True) == SamplingParams()  # type: ignore[call-arg]


def test_a_method_that_is_not_here_says_what_to_use(llm: LLM) -> None:
    for call, sentence in (
        (lambda: llm.encode, "LLM has no encode: docs/vllm.md says what to use instead"),
        (lambda: llm.llm_engine.sleep, "LLMEngine has no sleep: docs/vllm.md"),
        (lambda: llm.nonsense, "LLM has no nonsense$"),
    ):
        with pytest.raises(AttributeError, match=sentence):
            call()
    assert not hasattr(llm, "sleep")


def test_an_engine_without_a_tokenizer_serves_token_ids_alone(llama: TinyModel, tmp_path: Path) -> None:
    for path in Path(llama.folder).iterdir():
        if "token" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    bare = LLM(str(tmp_path), skip_tokenizer_init=True, **ROOM)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    (output,) = bare.generate([[1, 2]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert (output.prompt, output.outputs[0].text) == (None, "")
    calls: list[Callable[[], Any]] = [
        lambda: bare.generate("a", use_tqdm=False),
        lambda: bare.chat(HI, use_tqdm=False),
        lambda: bare.generate([1], SamplingParams(stop="a"), use_tqdm=False),
        lambda: bare.generate([1], SamplingParams(bad_words=["a"]), use_tqdm=False),
        lambda: bare.generate([1], SamplingParams(structured_outputs={"choice": ["a"]}), use_tqdm=False),  # type: ignore[arg-type]
        bare.get_tokenizer,
    ]
    for call in calls:
        with pytest.raises(HeadraceEngineError):
            call()
    bare.close()
    with pytest.raises(ModelLoadError, match="tokenizer"):
        LLM(str(tmp_path), **ROOM)


def test_another_folders_tokenizer_may_be_used(llama: TinyModel, tmp_path: Path) -> None:
    for path in Path(llama.folder).iterdir():
        if "token" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    made = LLM(str(tmp_path), tokenizer=llama.folder, **ROOM)
    assert made.generate("the mill", GREEDY, use_tqdm=False)[0].outputs[0].text
    assert made.get_tokenizer() is not None
    made.close()


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./typo", "a/b/c", "my model", "~/model", "folder/", "x.gguf", "a\0"]
)
def test_a_mistyped_folder_is_told_for_what_it_is(model: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        LLM(model)
    assert "repo" not in str(refused.value).lower()
    assert "there is no such" in str(refused.value) or "no path" in str(refused.value)


def test_a_name_like_the_default_models_is_answered_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="did you mean smollm2-135m-instruct"):
        LLM("SmolLM2-135M-Instrukt")


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_program_without_a_loop_ends_an_engine_of_streams(llama: TinyModel) -> None:
    made = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=llama.folder, **ROOM))

    async def first() -> str:
        async for output in made.generate("a", GREEDY, 0):
            text = output.outputs[0].text
        return text

    assert asyncio.run(first()) is not None
    made.shutdown()
    made.shutdown()
    assert made.is_stopped


async def test_open_streams_end_when_the_engine_does(llama: TinyModel) -> None:
    made = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=llama.folder, core_in_process=True, **ROOM))
    stream = made.generate([1, 2], SamplingParams(max_tokens=60, ignore_eos=True), 0)
    await anext(aiter(stream))
    made.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        async for _ in stream:
            pass


def test_an_adapter_may_be_named_by_a_path(tmp_path: Path) -> None:
    assert LoRARequest("sql", np.int64(1), tmp_path) == LoRARequest("sql", 1, str(tmp_path))  # type: ignore[arg-type]


def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenised(
    llm: LLM, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "wheel " * 1_333_334
    with pytest.raises(InvalidRequestError, match="the prompt has 8000004 characters, the first"):
        llm.generate(text, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="characters, the first"):
        engine.add_request("a", text, GREEDY)


async def test_a_stream_refuses_a_text_that_is_far_too_long(streams: AsyncLLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="characters, the first"):
        await anext(aiter(streams.generate("wheel " * 1_333_334, GREEDY, "a")))
