"""`LLM.beam_search` returns the sequences of transformers' beam search."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.tiny_models import TinyModel
from headrace_engine import LLM, BeamSearchParams
from headrace_engine.errors import InvalidRequestError

PROMPTS = [[5, 6, 7], [300, 20, 9, 41, 100, 7], [11]]


@pytest.fixture(scope="module")
def llm(llama: TinyModel) -> Iterator[LLM]:
    made = LLM(llama.folder, dtype="float32", num_blocks=80, block_size=16, max_num_batched_tokens=64)
    yield made
    made.close()


@torch.inference_mode()
def beams_of_transformers(model: TinyModel, prompt: list[int], width: int, max_tokens: int) -> list[list[int]]:
    output = model.reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        pad_token_id=0,
    )
    found: list[list[int]] = output.tolist()
    return found


@torch.inference_mode()
def logprobs_of_transformers(model: TinyModel, tokens: list[int]) -> torch.Tensor:
    return torch.log_softmax(model.reference(torch.tensor([tokens])).logits[0], dim=-1)


@pytest.mark.parametrize(("width", "limit"), [(1, None), (4, None), (4, 2)])
def test_the_beams_are_those_of_transformers(llm: LLM, llama: TinyModel, width: int, limit: int | None) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=9, ignore_eos=True)
    outputs = llm.beam_search(PROMPTS, params, concurrency_limit=limit)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert [s.tokens for s in output.sequences] == beams_of_transformers(llama, prompt, width, 9)
        for sequence in output.sequences:
            assert sequence.text == llm.engine.tokenizer.decode(sequence.tokens)
            row = logprobs_of_transformers(llama, sequence.tokens)
            chosen = [float(row[i - 1, sequence.tokens[i]]) for i in range(len(prompt), len(sequence.tokens))]
            assert sequence.cum_logprob == pytest.approx(sum(chosen), abs=1e-3)


def test_a_text_prompt_and_the_end_of_the_context(llm: LLM) -> None:
    (output,) = llm.beam_search(
        {"prompt_token_ids": [5] * 250}, BeamSearchParams(beam_width=2, max_tokens=20, ignore_eos=True)
    )
    assert {len(sequence.tokens) for sequence in output.sequences} == {256}
    (output,) = llm.beam_search("The wheel", BeamSearchParams(beam_width=2, max_tokens=2))
    assert output.sequences[0].text is not None
    assert output.sequences[0].text.startswith("The wheel")


def test_what_cannot_be_searched_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="logprobs must be at most 20, the engine's max_logprobs, got 22"):
        llm.beam_search("a", BeamSearchParams(beam_width=11, max_tokens=2))
    with pytest.raises(InvalidRequestError, match="concurrency_limit must be at least 1"):
        llm.beam_search("a", BeamSearchParams(beam_width=1, max_tokens=2), concurrency_limit=0)
    assert not llm.engine.has_unfinished_requests()
    assert llm.beam_search([], BeamSearchParams(beam_width=1, max_tokens=2)) == []
