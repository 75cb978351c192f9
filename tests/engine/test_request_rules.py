"""What a request may ask for: tokens, texts and the format of its output, through the engine's public classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.tiny_models import VOCAB_SIZE, TinyModel, load_model_tokenizer
from headrace_engine import LLM, LLMEngine, RequestOutput, SamplingParams
from headrace_engine.errors import InvalidRequestError
from headrace_engine.requests.sampling_params import RequestOutputKind
from headrace_engine.text.tokenizer import ModelTokenizer

MakeEngine = Callable[..., LLMEngine]
EOS = 2


@pytest.fixture(scope="module")
def llm(llama: TinyModel) -> Iterator[LLM]:
    made = LLM(llama.folder, dtype="float32", num_blocks=80, block_size=16)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer(llama: TinyModel) -> ModelTokenizer:
    return load_model_tokenizer(llama.folder)


def generate(llm: LLM, prompt: Any = "The wheel", **params: Any) -> RequestOutput:
    (output,) = llm.generate(prompt, SamplingParams(**{"max_tokens": 24, "seed": 5, **params}), use_tqdm=False)
    return output


def tokens(llm: LLM, **params: Any) -> list[int]:
    return generate(llm, **params).outputs[0].token_ids


# -- tokens --------------------------------------------------------------------------------------------------------


def test_only_allowed_tokens_are_generated(llm: LLM) -> None:
    allowed = [300, 7, 9, 300]
    found = tokens(llm, allowed_token_ids=allowed, temperature=1.5)
    assert len(found) == 24
    assert set(found) <= set(allowed)
    assert len(set(found)) > 1


def test_a_bias_can_forbid_and_can_force(llm: LLM) -> None:
    plain = tokens(llm, temperature=0, ignore_eos=True)
    assert plain[0] not in tokens(llm, temperature=0, ignore_eos=True, logit_bias={plain[0]: -100})
    assert tokens(llm, temperature=0, ignore_eos=True, logit_bias={"77": 100.0}) == [77] * 24


def test_bad_words_are_completed_neither_at_the_start_nor_within_the_text(llm: LLM, tokenizer: ModelTokenizer) -> None:
    plain = generate(llm, temperature=0, ignore_eos=True).outputs[0]
    # Pieces that the model would write: one token, and two tokens behind one another.
    pieces = [tokenizer.backend.decode([token]) for token in plain.token_ids]
    pieces += [tokenizer.backend.decode(plain.token_ids[i : i + 2]) for i in range(23)]
    pieces = [piece for piece in pieces if piece.strip() and "\ufffd" not in piece]
    assert len(pieces) > 3
    for piece in pieces[:8]:
        found = tokens(llm, temperature=0, ignore_eos=True, bad_words=[piece])
        assert found != plain.token_ids
        for forbidden in (tokenizer.encode_plain(prefix + piece.lstrip()) for prefix in ("", " ")):
            assert forbidden not in [found[i : i + len(forbidden)] for i in range(len(found))]


def test_the_token_that_would_complete_a_bad_word_is_forbidden_only_there(llm: LLM, tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode_plain("xyz")
    assert len(ids) == 3, "a word of three tokens"
    x, y, z = ids
    ways: dict[str, Any] = {"allowed_token_ids": ids, "temperature": 30.0, "max_tokens": 200}
    free = tokens(llm, **ways)
    bound = tokens(llm, **ways, bad_words=["xyz"])
    assert [x, y, z] in [free[i : i + 3] for i in range(200)]
    assert [x, y, z] not in [bound[i : i + 3] for i in range(200)]
    assert z in bound
    assert [x, y] in [bound[i : i + 2] for i in range(199)]


def test_rules_hold_when_a_request_is_preempted(make_engine: MakeEngine) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, allowed_token_ids=[50, 60, 70], logit_bias={60: 2}, seed=1)
    results = []
    for num_blocks in (80, 10):
        engine = make_engine(num_blocks=num_blocks, max_model_len=128)
        for name in "abc":
            engine.add_request(name, [5] * 40, params)
        found: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = output.outputs[0].token_ids
        results.append(found)
    assert results[0] == results[1]
    assert {token for found in results[0].values() for token in found} <= {50, 60, 70}


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"allowed_token_ids": [VOCAB_SIZE]}, f"allowed_token_ids must be token ids from 0 to 383, got {VOCAB_SIZE}"),
        ({"logit_bias": {VOCAB_SIZE: 1}}, f"logit_bias must be token ids from 0 to 383, got {VOCAB_SIZE}"),
        (
            {"allowed_token_ids": [EOS], "stop_token_ids": [EOS], "min_tokens": 1},
            "must hold a token that does not end",
        ),
        ({"extra_args": {"top_a": 1}}, "extra_args holds 'top_a', which no logits processor of this engine reads"),
    ],
)
def test_what_the_model_cannot_do_is_refused_at_the_door(llm: LLM, params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        generate(llm, **params)
    assert sentence in str(refused.value)


def test_a_request_whose_rules_leave_no_token_ends_with_the_reason(llm: LLM, tokenizer: ModelTokenizer) -> None:
    (x,) = tokenizer.encode_plain("x")
    found = generate(llm, allowed_token_ids=[x], bad_words=["xx"])
    assert found.outputs[0].finish_reason == "error"
    assert found.outputs[0].token_ids == [x]
    assert found.error == "no token is left that may follow: the request's rules forbid them all"
    assert len(tokens(llm, ignore_eos=True)) == 24  # the engine lives on
    with pytest.raises(InvalidRequestError, match="allowed_token_ids must hold a token that bad_words does not forbid"):
        generate(llm, allowed_token_ids=[x], bad_words=["x"])


def test_a_loop_ends_the_choice(llm: LLM) -> None:
    found = generate(
        llm,
        logit_bias={77: 100},
        temperature=0,
        max_tokens=None,
        repetition_detection={"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 4},
    ).outputs[0]
    assert found.token_ids == [77] * 8
    assert (found.finish_reason, found.stop_reason) == ("repetition", "repetition_detected")


# -- text ----------------------------------------------------------------------------------------------------------


def test_without_detokenizing_there_are_token_ids_alone(llm: LLM) -> None:
    plain = generate(llm, logprobs=1)
    bare = generate(llm, logprobs=1, detokenize=False)
    assert bare.outputs[0].token_ids == plain.outputs[0].token_ids
    assert (bare.outputs[0].text, bool(plain.outputs[0].text)) == ("", True)
    assert {entry.decoded_token for position in bare.outputs[0].logprobs or [] for entry in position.values()} == {None}


def test_special_tokens_may_be_shown_without_anything_between_them(llm: LLM) -> None:
    shown = {"skip_special_tokens": False, "allowed_token_ids": [3, 4], "ignore_eos": True, "max_tokens": 6}
    close = generate(llm, **shown, spaces_between_special_tokens=False).outputs[0]
    names = {3: "<|user|>", 4: "<|assistant|>"}
    assert close.text == "".join(names[token] for token in close.token_ids)


# -- stream_interval -----------------------------------------------------------------------------------------------


def stream(engine: LLMEngine, **params: Any) -> list[RequestOutput]:
    engine.add_request("a", "The wheel", SamplingParams(**{"ignore_eos": True, "seed": 2, **params}))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_tokens_are_gathered_between_the_first_and_the_last(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ways: dict[str, Any] = {"max_tokens": 12, "logprobs": 0, "output_kind": RequestOutputKind.DELTA}
    plain = [output.outputs[0] for output in stream(engine, **ways)]
    gathered = [output.outputs[0] for output in stream(engine, **ways, stream_interval=4)]
    assert [len(choice.token_ids) for choice in plain] == [1] * 12
    assert [len(choice.token_ids) for choice in gathered] == [1, 4, 4, 3]
    for part in ("token_ids", "text", "logprobs"):
        assert [x for choice in gathered for x in getattr(choice, part)] == [
            x for choice in plain for x in getattr(choice, part)
        ]


def test_cumulative_outputs_keep_the_interval_too(make_engine: MakeEngine) -> None:
    outputs = stream(make_engine(), max_tokens=10, stream_interval=5)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 6, 10]


def test_an_abort_shows_what_was_gathered(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=50, ignore_eos=True, stream_interval=100, output_kind=RequestOutputKind.DELTA)
    engine.add_request("a", "The wheel", params)
    shown = [output for _ in range(5) for output in engine.step()]
    last = engine.abort("a")
    assert last is not None
    assert [len(output.outputs[0].token_ids) for output in shown] == [1]
    assert len(last.outputs[0].token_ids) == 4
    assert last.outputs[0].text
