"""The input processor: which requests it refuses, with which messages, and what a request becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.model_families import VOCAB_SIZE
from engine.tiny_models import TinyModel, load_model_tokenizer
from headrace_engine.api.input_processor import InputProcessor, choice_seed
from headrace_engine.errors import ContextLengthError, InvalidRequestError
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.contracts import ModelInfo

MAX_MODEL_LEN = 20


@pytest.fixture(scope="module")
def processor(llama: TinyModel) -> InputProcessor:
    info = ModelInfo(
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[2],
        architecture="Tiny",
        dtype="float32",
        device="cpu",
        attention="none",
        num_parameters=1,
    )
    return InputProcessor(info, load_model_tokenizer(llama.folder))


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, -1], f"prompt_token_ids must be token ids from 0 to {VOCAB_SIZE - 1}, got -1"),
        ([1, VOCAB_SIZE], f"prompt_token_ids must be token ids from 0 to {VOCAB_SIZE - 1}, got {VOCAB_SIZE}"),
        ([1, True], "a prompt must be text or a list of token ids"),
        ([1, "x"], "a prompt must be text or a list of token ids"),
        ([1.0], "a prompt must be text or a list of token ids"),
        (b"bytes", "a prompt must be text or a list of token ids"),
        (7, "a prompt must be text or a list of token ids"),
        (None, "a prompt must be text or a list of token ids"),
        ({}, "a prompt map must hold prompt or prompt_token_ids"),
        ({"prompt": None}, "a prompt map must hold prompt or prompt_token_ids"),
        ({"prompt": "a", "image": "b"}, "a prompt map must hold text or token ids only, got 'image'"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "images, audio, video and embeddings are not supported"),
        (
            {"prompt": "a", "multi_modal_data": np.array([1, 2])},
            "images, audio, video and embeddings are not supported",
        ),
        ({"prompt": "a", "prompt_embeds": torch.ones(2, 2)}, "images, audio, video and embeddings are not supported"),
        ({"prompt": 5}, "prompt must be text, got a int"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be text that is not empty, got ''"),
        ("a\ud800", "the prompt must be valid Unicode, got a lone surrogate"),
        ({"prompt": "\udfff"}, "the prompt must be valid Unicode, got a lone surrogate"),
        ([10**5000], "got an integer of 16610 bits"),
        (np.array([1.0]), "a prompt must be text or a list of token ids"),
        (np.array([[1]]), "a prompt must be text or a list of token ids"),
        (np.array([True]), "a prompt must be text or a list of token ids"),
    ],
)
def test_a_wrong_prompt_is_refused(processor: InputProcessor, prompt: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        processor.process("a", prompt, SamplingParams())
    assert sentence in str(refused.value)
    assert refused.value.code == "invalid_request"


def test_a_prompt_that_leaves_no_room_is_refused_with_the_limit(processor: InputProcessor) -> None:
    processor.process("a", [5] * (MAX_MODEL_LEN - 1), SamplingParams())
    with pytest.raises(ContextLengthError, match="has 20 tokens and leaves no room") as refused:
        processor.process("a", [5] * MAX_MODEL_LEN, SamplingParams())
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("prompt", [[5] * MAX_MODEL_LEN, "x" * 100_000, "ab" * 100_000])
def test_clients_know_a_prompt_that_is_too_long_by_the_words_of_openai(
    processor: InputProcessor, prompt: str | list[int]
) -> None:
    """litellm, for one, finds its ContextWindowExceededError by them."""
    with pytest.raises(ContextLengthError, match=f"this model's maximum context length is {MAX_MODEL_LEN} tokens"):
        processor.process("a", prompt, SamplingParams())


def test_a_text_that_cannot_fit_is_refused_by_its_tokens(processor: InputProcessor) -> None:
    with pytest.raises(ContextLengthError, match="the prompt has 100000 tokens"):
        processor.process("a", "x" * 100_000, SamplingParams())
    with pytest.raises(ContextLengthError, match="tokens"):
        processor.process_chat("a", [{"role": "user", "content": "x" * 100_000}], SamplingParams())


def test_stop_tokens_outside_the_vocabulary_are_refused(processor: InputProcessor) -> None:
    with pytest.raises(InvalidRequestError, match=f"stop_token_ids must be token ids .*, got {VOCAB_SIZE}"):
        processor.process("a", [1], SamplingParams(stop_token_ids=[VOCAB_SIZE]))


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "messages must be a list with at least one message"),
        ("hello", "messages must be a list with at least one message"),
        ([{"role": "user"}], "message 0 must be a map with the texts role and content"),
        ([{"role": "user", "content": "a"}, 5], "message 1 must be a map"),
        ({"role": "user", "content": "a"}, "messages must be a list of messages, got one map: put it into a list"),
        ([{"role": "user", "content": None}], "message 0 must be a map with the texts role and content"),
        ([{"role": "user", "content": 5}], "message 0 must be a map with the texts role and content"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "part 0 of message 0 is of type 'image_url', but",
        ),
        ([{"role": "user", "content": ["a", {"type": "input_audio"}]}], "part 1 of message 0 is of type 'input_audio'"),
        ([{"role": "user", "content": [5]}], "part 0 of message 0 must be text, or a map with the texts type and text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part 0 of message 0 has no text, or one that is no text"),
        ([{"role": "user", "content": "\ud800"}], "message 0 must hold valid Unicode text"),
        ([{"role": "\ud800", "content": ""}], "message 0 must hold valid Unicode text"),
        (
            [{"role": "user", "content": "a", "extra": object()}],
            "message 0 must hold only numbers, strings, lists and maps",
        ),
        ([{"role": "assistant", "tool_calls": 5}], "tool_calls of message 0 must be a list of maps"),
        ([{"role": "assistant", "tool_calls": [{}]}], "tool_calls of message 0 must hold maps with a function"),
        ([{"role": "critic", "content": "bad"}], "refuses these messages: critics are not served"),
    ],
)
def test_wrong_messages_are_refused(processor: InputProcessor, messages: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        processor.process_chat("a", messages, SamplingParams())
    assert sentence in str(refused.value)


@pytest.mark.parametrize("array", [np.array, torch.tensor, tuple, lambda ids: [np.int64(token) for token in ids]])
def test_token_ids_may_come_as_an_array(processor: InputProcessor, array: Any) -> None:
    made = processor.process("a", array([3, 4]), SamplingParams())
    assert made.prompt_token_ids == [3, 4]
    assert {type(token) for token in made.prompt_token_ids} == {int}
    assert processor.process("a", {"prompt_token_ids": array([3, 4])}, SamplingParams()).prompt_token_ids == [3, 4]


def test_a_prompt_map_may_hold_the_text_of_its_tokens_and_a_salt(processor: InputProcessor) -> None:
    made = processor.process(
        "a", {"prompt": "as I say", "prompt_token_ids": [3, 4], "cache_salt": "mine"}, SamplingParams()
    )
    assert (made.prompt, made.prompt_token_ids, made.choices[0].cache_salt) == ("as I say", [3, 4], "mine")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"params": {"n": 1}}, "sampling parameters must be SamplingParams, got a dict"),
        ({"priority": "high"}, "priority must be an integer of 64 bits, got 'high'"),
        ({"priority": True}, "priority must be an integer of 64 bits, got True"),
        ({"priority": 2**63}, f"priority must be an integer of 64 bits, got {2**63}"),
        ({"lora_request": "sql"}, "lora_request must be LoRARequest, got a str"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(
    processor: InputProcessor, options: dict[str, Any], sentence: str
) -> None:
    for process, prompt in ((processor.process, [1]), (processor.process_chat, [{"role": "user", "content": "a"}])):
        with pytest.raises(InvalidRequestError) as refused:
            process("a", prompt, **{"params": SamplingParams(), **options})
        assert sentence in str(refused.value)


def test_an_engines_seed_makes_its_requests_draw_the_same_in_each_run(processor: InputProcessor) -> None:
    def drawn(seed: int) -> list[int]:
        made = InputProcessor(processor._model_info, processor.tokenizer, seed=seed)
        return [made.process("a", [1], SamplingParams()).seed for _ in range(3)]

    assert drawn(0) == drawn(0) != drawn(1)
    assert len(set(drawn(0))) == 3


def test_a_chat_is_rendered_for_the_assistants_turn(processor: InputProcessor, llama: TinyModel) -> None:
    made = processor.process_chat("a", [{"role": "user", "content": "hi"}], SamplingParams())
    assert made.prompt == "<|user|>hi<eos><|assistant|>"
    tokenizer = load_model_tokenizer(llama.folder).backend
    ends = [tokenizer.token_to_id(token) for token in ("<|user|>", "<eos>", "<|assistant|>")]
    assert [made.prompt_token_ids[0], *made.prompt_token_ids[-2:]] == ends


def test_text_and_its_tokens_are_the_same_request(processor: InputProcessor) -> None:
    from_text = processor.process("a", "the mill", SamplingParams(seed=1))
    from_map = processor.process("a", {"prompt": "the mill"}, SamplingParams(seed=1))
    from_ids = processor.process("a", {"prompt_token_ids": from_text.prompt_token_ids}, SamplingParams(seed=1))
    assert from_text.prompt == from_map.prompt == "the mill"
    assert from_ids.prompt is None
    assert from_text.prompt_token_ids == from_map.prompt_token_ids == from_ids.prompt_token_ids


def test_each_choice_is_a_request_of_its_own_with_its_own_seed(processor: InputProcessor) -> None:
    prompt: Any = {"prompt_token_ids": [1, 2], "cache_salt": "t"}
    made = processor.process("a", prompt, SamplingParams(n=4, seed=-5, stop=["x"]), priority=3)
    assert [choice.seed for choice in made.choices] == [choice_seed(-5, index) for index in range(4)]
    assert made.choices[0].seed == -5
    assert len({choice.seed for choice in made.choices}) == len({choice.request_id for choice in made.choices}) == 4
    for choice in made.choices:
        assert (choice.priority, choice.cache_salt, choice.eos_token_ids) == (3, "t", [2])
        assert choice.sampling_params.stop == []  # strings are not the core's business
        assert -(2**63) <= choice.seed < 2**63


def test_choice_seeds_never_change() -> None:
    # They decide what a resumed request draws.
    assert [choice_seed(42, index) for index in range(3)] == [42, 7003778869905922103, 3448467494100910624]


def test_without_a_seed_each_request_gets_its_own(processor: InputProcessor) -> None:
    seeds = {processor.process("a", [1], SamplingParams()).seed for _ in range(5)}
    assert len(seeds) == 5


def test_the_cores_names_of_an_id_that_comes_back_are_new(processor: InputProcessor) -> None:
    first, second = (processor.process("a", [1], SamplingParams()).choices[0].request_id for _ in range(2))
    assert first != second
