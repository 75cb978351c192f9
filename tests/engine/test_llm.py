"""`LLM` and `LLMEngine` on a tiny Llama."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine.tiny_models import TinyModel
from headrace_engine import LLM, LLMEngine, RequestOutput, SamplingParams
from headrace_engine.core.core_client import InProcessCore
from headrace_engine.errors import (
    ConfigError,
    ContextLengthError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
)
from headrace_engine.requests.request import EngineCoreRequest, FinishReason
from headrace_engine.requests.sampling_params import RequestOutputKind

MakeEngine = Callable[..., LLMEngine]


@pytest.fixture(scope="module", params=["cpu", "static-cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(llama: TinyModel, device: str) -> Iterator[LLM]:
    made = LLM(llama.folder, device=device, dtype="float32", num_blocks=80, block_size=16)
    yield made
    made.close()


def generate(llm: LLM, *args: Any) -> list[RequestOutput]:
    return llm.generate(*args, use_tqdm=False)


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """All outputs until nothing is left, by request."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def core_of(engine: LLMEngine) -> Any:
    assert isinstance(engine._core, InProcessCore)
    return engine._core.core


# -- LLM -----------------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_prompts_order_whatever_ends_first(llm: LLM) -> None:
    prompts = ["The wheel", "A", "The queue holds what the wheel cannot take"]
    params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for m in (9, 1, 4)]
    outputs = generate(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 4]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


@torch.inference_mode()
def test_greedy_text_is_the_decoded_reference(llm: LLM, llama: TinyModel) -> None:
    (output,) = generate(llm, "The wheel turns", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    prompt = torch.tensor([output.prompt_token_ids])
    expected = llama.reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    assert output.outputs[0].token_ids == expected[0, prompt.shape[1] :].tolist()


def test_one_prompt_may_be_given_in_every_form(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    (text,) = generate(llm, "mill", params)
    ids = text.prompt_token_ids
    for prompt in (ids, [ids], {"prompt": "mill"}, [{"prompt_token_ids": ids}]):
        (output,) = generate(llm, prompt, params)
        assert output.outputs[0].token_ids == text.outputs[0].token_ids
    assert generate(llm, [], params) == []


def test_a_chat_and_its_rendered_prompt_give_the_same_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    conversation = [{"role": "system", "content": "fine"}, {"role": "user", "content": "how are you"}]
    (one,) = llm.chat(conversation, params, use_tqdm=False)
    many = llm.chat([conversation, conversation], params, use_tqdm=False)
    assert len(many) == 2
    (rendered,) = generate(llm, [one.prompt_token_ids], params)
    assert {tuple(o.outputs[0].token_ids) for o in (one, *many, rendered)} == {tuple(one.outputs[0].token_ids)}


def test_one_wrong_prompt_refuses_the_call_and_leaves_the_engine_usable(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        generate(llm, ["good", ""], SamplingParams(max_tokens=2))
    assert not llm.engine.has_unfinished_requests()
    with pytest.raises(InvalidRequestError, match="2 prompts came with 1 sampling params"):
        generate(llm, ["a", "b"], [SamplingParams()])
    assert len(generate(llm, ["good"], SamplingParams(max_tokens=2))) == 1


def test_logprobs_name_the_sampled_token_and_the_likeliest(llm: LLM) -> None:
    (output,) = generate(llm, "mill", SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True))
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 4
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert len(entry) == 3
        assert entry[token_id].rank == 1
        assert entry[token_id].logprob == max(candidate.logprob for candidate in entry.values())
        assert isinstance(entry[token_id].decoded_token, str)


def test_logprob_token_ids_name_the_tokens_that_are_reported(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=3, logprobs=20, ignore_eos=True)
    (output,) = generate(llm, "mill", plain)
    every = output.outputs[0].logprobs
    assert every is not None
    named = list(every[0])[5:8]
    asking = SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=named, ignore_eos=True)
    (output,) = generate(llm, "mill", asking)
    found = output.outputs[0].logprobs
    assert found is not None
    assert [set(entry) for entry in found] == [{token, *named} for token in output.outputs[0].token_ids]
    assert all(found[0][token] == every[0][token] for token in named)
    assert output.outputs[0].cumulative_logprob is not None


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids must hold 1 to 128 token ids, got 129"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
        (
            {"logprob_token_ids": [1, 2], "logprobs": 3},
            "logprobs must be absent with logprob_token_ids, or their number, 2",
        ),
    ],
)
def test_wrong_logprob_token_ids_are_refused(params: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        SamplingParams(**params)


def test_a_named_token_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="logprob_token_ids must be token ids from 0 to"):
        generate(llm, "mill", SamplingParams(logprob_token_ids=[10_000_000]))


def test_several_choices_differ_and_the_first_is_the_one_of_a_single_choice(llm: LLM) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "seed": 11, "ignore_eos": True}
    (single,) = generate(llm, "mill", SamplingParams(**params))
    (several,) = generate(llm, "mill", SamplingParams(n=4, **params))
    assert [choice.index for choice in several.outputs] == [0, 1, 2, 3]
    assert several.outputs[0].token_ids == single.outputs[0].token_ids
    assert len({tuple(choice.token_ids) for choice in several.outputs}) == 4
    (again,) = generate(llm, "mill", SamplingParams(n=4, **params))
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in several.outputs]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    free = generate(llm, "mill", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0].text
    stop = free[5:8]
    (output,) = generate(llm, "mill", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=stop))
    choice = output.outputs[0]
    assert choice.text == free[: free.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_a_stop_token_is_in_the_tokens_but_not_in_the_text(llm: LLM) -> None:
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    free = generate(llm, "mill", SamplingParams(**params))[0].outputs[0]
    at = next(i for i in range(3, 12) if free.token_ids[i] not in free.token_ids[:i])
    stop = free.token_ids[at]
    before = generate(llm, "mill", SamplingParams(**{**params, "max_tokens": at}))[0].outputs[0]
    choice = generate(llm, "mill", SamplingParams(**params, stop_token_ids=[stop]))[0].outputs[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.token_ids == free.token_ids[: at + 1]
    assert choice.text == before.text


# -- randomness ----------------------------------------------------------------------------------------------------

SAMPLED: dict[str, Any] = {"temperature": 1.3, "top_p": 0.95, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def sampled_alone(llm: LLM) -> list[list[int]]:
    """16 seeded requests, each generated alone."""
    return [
        generate(llm, [prompt], SamplingParams(seed=index, **SAMPLED))[0].outputs[0].token_ids
        for index, prompt in enumerate(PROMPTS)
    ]


PROMPTS = [[10 + index] * (1 + 2 * index) for index in range(16)]


@pytest.mark.parametrize(
    ("options", "preempts"),
    [({}, False), ({"num_blocks": 12, "max_model_len": 64}, True), ({"max_num_batched_tokens": 7}, False)],
    ids=["batch", "preemption", "chunks"],
)
def test_a_seeded_request_draws_the_same_tokens_in_any_company(
    make_engine: MakeEngine, sampled_alone: list[list[int]], options: dict[str, Any], preempts: bool
) -> None:
    engine = make_engine(**options)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, SamplingParams(seed=index, **SAMPLED))
    preemptions = 0
    finished: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            finished[output.request_id] = output.outputs[0].token_ids
        preemptions += core_of(engine).scheduler.stats.preemptions
    assert (preemptions > 0) == preempts
    assert [finished[str(index)] for index in range(16)] == sampled_alone


def test_a_resumed_request_goes_on_exactly_where_it_was(make_engine: MakeEngine) -> None:
    core = make_engine()._core
    params = SamplingParams(
        temperature=1.2, max_tokens=14, frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=5, ignore_eos=True
    )

    def tokens_after(output: list[int]) -> list[int]:
        core.add_request(
            EngineCoreRequest(
                request_id=f"after {len(output)}",
                prompt_token_ids=PROMPTS[7],
                output_token_ids=output,
                sampling_params=params,
                seed=99,
            )
        )
        found: list[int] = []
        while True:
            outputs = core.get_outputs()
            assert outputs is not None
            for news in outputs.outputs:
                found += news.new_token_ids
                if news.finish_reason is not None:
                    assert news.finish_reason is FinishReason.LENGTH
                    return found

    whole = tokens_after([])
    assert len(whole) == 14
    for k in range(15):
        assert tokens_after(whole[:k]) == whole[k:]


def test_a_resumed_request_shows_the_rest_of_its_text(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = SamplingParams(
        temperature=0, max_tokens=10, ignore_eos=True, output_kind=RequestOutputKind.DELTA, stop=["zz"]
    )
    engine.add_request("whole", "mill", params)
    whole = [output.outputs[0] for output in run(engine)["whole"]]
    tokens = [token for choice in whole for token in choice.token_ids]
    for k in range(1, 10):
        request = engine.input_processor.process("again", "mill", params)
        request.choices[0].output_token_ids = tokens[:k]
        engine._add(request)
        assert [output.outputs[0].text for output in run(engine)["again"]] == [choice.text for choice in whole[k:]]


# -- LLMEngine -----------------------------------------------------------------------------------------------------


def test_each_step_shows_what_the_output_kind_asks_for(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, output_kind=kind, logprobs=0)
        engine.add_request(kind.value, "mill", params)
    outputs = run(engine)
    (final,) = outputs["final_only"]
    cumulative, delta = outputs["cumulative"], outputs["delta"]
    assert [len(o.outputs[0].token_ids) for o in cumulative] == [1, 2, 3, 4, 5]
    # not their log-probabilities: padded to another shape, logits may differ in their last bits
    last, whole = cumulative[-1].outputs[0], final.outputs[0]
    assert (last.text, last.token_ids, last.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)
    assert len(last.logprobs or ()) == len(whole.logprobs or ()) == 5
    assert "".join(o.outputs[0].text for o in delta) == final.outputs[0].text
    assert [o.outputs[0].token_ids for o in delta] == [[token] for token in final.outputs[0].token_ids]
    assert [len(o.outputs[0].logprobs or ()) for o in delta] == [1] * 5
    assert [o.finished for o in delta] == [False] * 4 + [True]


def test_an_aborted_request_ends_at_once_and_its_memory_is_free(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("gone", "mill", SamplingParams(n=2, max_tokens=100, ignore_eos=True))
    engine.add_request("stays", "wheel", SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    last = engine.abort("gone")
    assert last is not None
    assert last.finished
    assert [choice.finish_reason for choice in last.outputs] == ["abort", "abort"]
    assert engine.abort("gone") is None
    assert set(run(engine)) == {"stays"}
    scheduler = core_of(engine).scheduler
    assert scheduler.requests == {}
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


def test_a_stop_string_ends_the_request_in_the_core_too(make_engine: MakeEngine) -> None:
    engine = make_engine()
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request("a", "mill", free)
    text = run(engine)["a"][-1].outputs[0].text
    engine.add_request("a", "mill", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop=[text[:2]]))
    engine.add_request("b", "mill", free)
    run(engine)
    assert core_of(engine).scheduler.requests == {}


def test_an_id_in_use_is_refused_until_its_request_has_ended(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("a", "mill", SamplingParams(max_tokens=1))
    with pytest.raises(DuplicateRequestError, match="request a is in the engine already"):
        engine.add_request("a", "mill")
    run(engine)
    engine.add_request("a", "mill", SamplingParams(max_tokens=1))
    assert run(engine)["a"][0].finished


def test_news_of_an_aborted_request_are_not_taken_for_those_of_its_successor(make_engine: MakeEngine) -> None:
    # With the core in a child, steps computed before the abort arrive after it.
    engine = make_engine(core_in_process=False)
    endless = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("alone", "wheel", short)
    expected = run(engine)["alone"][-1].outputs[0].token_ids
    for _ in range(5):
        engine.add_request("a", "mill", endless)
        engine.step()
        engine.abort("a")
        engine.add_request("a", "wheel", short)
        assert run(engine)["a"][-1].outputs[0].token_ids == expected


def test_a_request_refused_by_the_core_ends_with_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_queued_requests=1)
    for name in "abc":
        engine.add_request(name, "mill", SamplingParams(max_tokens=2, ignore_eos=True))
    outputs = run(engine)
    ends = {name: outputs[name][-1].outputs[0].finish_reason for name in "abc"}
    assert ends == {"a": "length", "b": "error", "c": "error"}
    assert outputs["b"][-1].error == "the queue is full: 1 requests wait, and max_num_queued_requests is 1"


def test_cached_tokens_are_reported(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = list(range(10, 50))
    for name in "ab":
        engine.add_request(name, prompt, SamplingParams(max_tokens=1))
        (output,) = run(engine)[name]
        assert output.num_cached_tokens == {"a": 0, "b": 32}[name]


def test_an_engine_closed_in_the_middle_is_dead_and_not_silent(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("a", "mill", SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    engine.close()
    with pytest.raises(EngineDeadError):
        run(engine)


def test_a_runner_that_fails_leaves_a_dead_engine(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def fail(*_: object) -> None:
        raise MemoryError("no memory for the attention kernel's scratch space")

    monkeypatch.setattr(core_of(engine).runner, "execute_model", fail)
    engine.add_request("a", "mill")
    with pytest.raises(EngineDeadError, match="MemoryError: no memory"):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.step()


def test_the_context_ends_a_request(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=24)
    engine.add_request("a", [5] * 20, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(run(engine)["a"][-1].outputs[0].token_ids) == 4
    with pytest.raises(ContextLengthError):
        engine.add_request("b", [5] * 24)


def test_an_engine_that_is_dropped_gives_its_model_back(llama: TinyModel) -> None:
    llm = LLM(llama.folder, dtype="float32", num_blocks=20, block_size=16)
    model = weakref.ref(core_of(llm.engine).runner._model)
    llm.generate(["mill"], SamplingParams(max_tokens=2), use_tqdm=False)
    llm.close()
    del llm
    gc.collect()
    assert model() is None


def test_engines_in_one_process_do_not_mix(tiny_model: Callable[[str], TinyModel], llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (before,) = generate(llm, "mill", params)
    other = LLM(tiny_model("mistral").folder, dtype="float32", num_blocks=80, block_size=16)
    assert generate(other, "mill", params)[0].outputs[0].token_ids != before.outputs[0].token_ids
    assert generate(llm, "mill", params)[0].outputs == before.outputs
    other.close()


# -- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"max_model_len": 10_000}, ConfigError, "max_model_len must be at most 256, the model's positions, got 10000"),
        ({"num_blocks": 5}, ConfigError, "max_model_len=256 tokens needs 17 KV blocks .* but num_blocks gives 5"),
        ({"kv_cache_memory": 1000}, ConfigError, "kv_cache_memory=1000 gives 0"),
        ({"dtype": "float16"}, ConfigError, "dtype must be one of .*, got 'float16'"),
        ({"attention_backend": "native", "block_size": 24}, ConfigError, "attention_backend=native cannot be used"),
        ({"device": "tpu"}, ConfigError, "device must be one of .*, got 'tpu'"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    llama: TinyModel, options: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        LLM(llama.folder, **{"dtype": "float32", "block_size": 16, **options})


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path: Any) -> None:
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        LLM(str(tmp_path))


def test_weights_that_must_be_unpickled_are_refused(llama: TinyModel, tmp_path: Any) -> None:
    llama.reference.config.save_pretrained(tmp_path)
    torch.save(llama.reference.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        LLM(str(tmp_path))


# -- priority ------------------------------------------------------------------------------------------------------


def test_a_lower_number_is_served_first_through_every_door(llama: TinyModel) -> None:
    served: list[str] = []
    llm = LLM(llama.folder, dtype="float32", num_blocks=80, block_size=16, max_num_seqs=1, scheduling_policy="priority")
    step = llm.engine.step

    def watched() -> list[RequestOutput]:
        outputs = step()
        served.extend(output.prompt or "" for output in outputs if output.finished)
        return outputs

    llm.engine.step = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate(["a", "b", "c"], params, priority=[5, 9, 1], use_tqdm=False)
    assert served == ["c", "a", "b"]
    served.clear()
    talks = [[{"role": "user", "content": name}] for name in "xy"]
    llm.chat(talks, params, priority=[3, 0], use_tqdm=False)
    assert ["x" in served[0], "y" in served[0]] == [False, True]
    served.clear()
    for name, priority in (("d", 4), ("e", 2)):
        llm.engine.add_request(name, name, params, priority=priority)
    assert llm.engine.get_num_unfinished_requests() == 2
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert served == ["e", "d"]
    with pytest.raises(InvalidRequestError, match="2 prompts came with 1 priorities"):
        llm.generate(["a", "b"], params, priority=[1], use_tqdm=False)
    llm.close()
