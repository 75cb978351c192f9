"""The library: what `LLM.embed`, `classify` and `score` take, return and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.pooling.tiny_pooling_models import NORMALIZE, SCORERS, add_modules, build, pooling
from engine.tiny_models import TinyModel
from headrace_engine import LLM, PoolingParams, SamplingParams
from headrace_engine.errors import HeadraceEngineError, InvalidRequestError

Load = Callable[[str], LLM]


def vectors(llm: LLM, items: Any, **options: Any) -> torch.Tensor:
    outputs = llm.embed(items, use_tqdm=False, pooling_params=PoolingParams(**options))
    return torch.tensor([output.outputs.embedding for output in outputs])


def test_text_and_its_token_ids_have_the_same_embedding(pooling_llm: Load) -> None:
    llm = pooling_llm("bert")
    (output,) = llm.embed("the mill", use_tqdm=False)
    assert len(output.outputs.embedding) == output.outputs.hidden_size == 32
    ids = output.prompt_token_ids
    for same in (ids, [ids], {"prompt_token_ids": ids}, {"prompt": "the mill"}, [{"prompt": "the mill"}]):
        assert llm.embed(same, use_tqdm=False)[0].outputs == output.outputs


def test_an_embedding_is_cut_before_it_is_normalised(tmp_path: Path) -> None:
    build(tmp_path, "bert", config={"matryoshka_dimensions": [8, 16]})
    add_modules(tmp_path, [pooling(), NORMALIZE])
    llm = LLM(str(tmp_path), dtype="float32")
    whole, cut = vectors(llm, ["water"], use_activation=False), vectors(llm, ["water"], dimensions=8)
    torch.testing.assert_close(cut, torch.nn.functional.normalize(whole[:, :8]))
    assert not torch.allclose(whole, torch.nn.functional.normalize(whole))
    for wrong, reason in ((9, "dimensions must be one of 32, 16, 8, got 9"), (33, "must be 1 to 32, got 33")):
        with pytest.raises(InvalidRequestError, match=reason):
            vectors(llm, ["water"], dimensions=wrong)


def test_a_text_that_is_too_long_is_refused_or_cut_where_the_caller_says(pooling_llm: Load) -> None:
    llm, text = pooling_llm("bert"), "water " * 30 + "mill " * 40
    with pytest.raises(InvalidRequestError, match=r'input\[1\] has 72 tokens, the model takes 60: .* truncate: "end"'):
        vectors(llm, ["a", text])
    ends, starts = (
        llm.embed(text, use_tqdm=False, pooling_params=PoolingParams(truncate=side))[0].prompt_token_ids
        for side in ("end", "start")
    )
    whole = llm.embed("water mill", use_tqdm=False)[0].prompt_token_ids
    first, water, mill, last = whole
    assert ends == [first, *[water] * 30, *[mill] * 28, last]
    assert starts == [first, *[water] * 18, *[mill] * 40, last]
    short = llm.embed(text, use_tqdm=False, pooling_params=PoolingParams(truncate="end", max_tokens=5))
    assert short[0].prompt_token_ids == [first, water, water, water, last]


def test_only_the_document_of_a_pair_is_cut(pooling_llm: Load) -> None:
    for name, limit in (("bert-1", 80), ("logit-score", 60)):
        llm = pooling_llm(name)
        (output,) = llm.score("mill mill", "water " * 90, use_tqdm=False, pooling_params=PoolingParams(truncate="end"))
        (whole,) = llm.score("mill mill", "water water", use_tqdm=False)
        ids = output.prompt_token_ids
        assert len(ids) == limit
        kept = whole.prompt_token_ids.index(ids[-3])  # the query, and what stands before the document
        assert ids[:kept] == whole.prompt_token_ids[:kept]
        assert ids[-1] == whole.prompt_token_ids[-1]
        with pytest.raises(
            InvalidRequestError, match=r"documents\[0\] has a query that leaves no room for the document"
        ):
            llm.score("mill " * 90, "water", use_tqdm=False, pooling_params=PoolingParams(truncate="end"))


def test_all_problems_are_named_at_once(pooling_llm: Load) -> None:
    llm = pooling_llm("bert")
    with pytest.raises(InvalidRequestError) as refused:
        llm.embed(["good", "", [1, 300], 7], use_tqdm=False)  # type: ignore[list-item]
    assert refused.value.problems == [
        "input[1] must not be empty",
        "input[2] must hold token ids of 0 to 299, got 300",
        "input[3] must be text, a pair of texts, or a list of token ids, got a int",
        "input holds text and token ids: use one kind",
    ]
    with pytest.raises(InvalidRequestError) as many:
        llm.embed([""] * 100, use_tqdm=False)
    assert len(many.value.problems) == 9
    with pytest.raises(InvalidRequestError, match="prompt_name 'qury' is unknown; this model has none"):
        vectors(llm, ["a"], prompt_name="qury")
    with pytest.raises(InvalidRequestError, match="prompt_name 'qury' is unknown; this model has query, document"):
        vectors(pooling_llm("prompt-pooled"), ["a"], prompt_name="qury")
    with pytest.raises(InvalidRequestError, match="prompt and prompt_name exclude each other"):
        PoolingParams(prompt="a", prompt_name="b")
    with pytest.raises(InvalidRequestError, match="truncate must be one of error, start, end, got 'left'"):
        PoolingParams(truncate="left")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens is 5, but it is not supported"):
        PoolingParams(truncate_prompt_tokens=5)  # type: ignore[call-arg]


def test_a_model_does_only_its_own_task(pooling_llm: Load, llama: TinyModel) -> None:
    embeds, classifies = pooling_llm("bert"), pooling_llm("bert-3")
    for wrong, reason in (
        (lambda: embeds.classify("a", use_tqdm=False), "computes embed of texts; it does not classify"),
        (lambda: classifies.embed("a", use_tqdm=False), "computes classify of texts; it does not embed"),
        (lambda: classifies.score("a", "b", use_tqdm=False), "computes classify of texts; it does not score"),
        (lambda: embeds.generate("a"), "does not generate: use embed"),
        (lambda: embeds.embed([("a", "b")], use_tqdm=False), "is a pair of texts, which has no embedding"),
        (
            lambda: pooling_llm("logit-score").score(["a", "b"], ["c"], use_tqdm=False),
            "queries has 2 entries, documents 1",
        ),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            wrong()  # type: ignore[no-untyped-call]
    with LLM(llama.folder, dtype="float32", num_blocks=20).engine as engine:
        assert engine.model_info.pooling is None
    generates = LLM(llama.folder, dtype="float32", num_blocks=20)
    with pytest.raises(InvalidRequestError, match="generates text; it computes no embeddings or scores"):
        generates.embed("a", use_tqdm=False)
    generates.close()


def test_a_model_that_embeds_scores_by_the_cosine(pooling_llm: Load) -> None:
    llm = pooling_llm("pooling-mean")  # whose own vectors are not normalised
    query, first, second = torch.nn.functional.normalize(vectors(llm, ["water", "river", "mill wheel"]))
    found = [output.outputs.score for output in llm.score("water", ["river", "mill wheel"], use_tqdm=False)]
    torch.testing.assert_close(torch.tensor(found), torch.stack([query @ first, query @ second]))


def test_the_order_of_a_pair_counts(pooling_llm: Load) -> None:
    llm = pooling_llm("bert-1")
    one, other = (llm.score(*pair, use_tqdm=False)[0].outputs.score for pair in (("a", "water"), ("water", "a")))
    assert one != other


def test_a_row_that_is_not_finite_is_an_error_with_its_index(pooling_folder: Callable[[str], Path]) -> None:
    llm = LLM(str(pooling_folder("bert")), dtype="float32")
    ids = llm.embed("water", use_tqdm=False)[0].prompt_token_ids
    embeddings: Any = llm.pooling_engine._core.runner._encoder._base.get_input_embeddings()  # type: ignore[attr-defined]
    before = llm.embed(["mill"], use_tqdm=False)[0].outputs
    with torch.no_grad():
        embeddings.weight[ids[1]] = torch.inf
    with pytest.raises(HeadraceEngineError, match=r"input\[2\] has no finite embedding"):
        llm.embed(["mill", "stone", "water", "mill"], use_tqdm=False)
    assert llm.embed(["mill"], use_tqdm=False)[0].outputs == before


def test_steps_take_the_tokens_that_the_option_allows(pooling_folder: Callable[[str], Path]) -> None:
    for options, tokens in (({}, 1024), ({"max_num_batched_tokens": 100}, 100)):
        llm = LLM(str(pooling_folder("bert")), dtype="float32", **options)
        assert llm.pooling_engine.info.max_step_tokens == tokens


def test_lower_case_is_made_where_the_folder_says(tmp_path: Path) -> None:
    build(tmp_path, "qwen3")  # whose tokenizer keeps capitals
    add_modules(tmp_path, [pooling("lasttoken")])
    assert not torch.equal(*(vectors(LLM(str(tmp_path), dtype="float32"), text) for text in ("Water", "water")))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 60, "do_lower_case": true}')
    assert torch.equal(*(vectors(LLM(str(tmp_path), dtype="float32"), text) for text in ("Water", "water")))


def test_a_reranker_that_generates_gives_the_same_score_by_named_log_probabilities(tmp_path: Path) -> None:
    SCORERS["logit-score"](tmp_path)  # as sentence-transformers keeps Qwen3-Reranker
    labels = json.loads((tmp_path / "1_LogitScore" / "config.json").read_text())
    scorer = LLM(str(tmp_path), dtype="float32")
    documents = ["the mill stands on the river", "no", "a b c"]
    outputs = scorer.score("water", documents, use_tqdm=False, pooling_params=PoolingParams(use_activation=False))
    scorer.close()
    (tmp_path / "modules.json").unlink()  # as Qwen publishes it: a model that generates
    yes, no = labels["true_token_id"], labels["false_token_id"]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=[yes, no])
    prompts = [{"prompt_token_ids": output.prompt_token_ids} for output in outputs]
    llm = LLM(str(tmp_path), dtype="float32", num_blocks=64)
    answers = [output.outputs[0].logprobs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    llm.close()
    found = [answer[yes].logprob - answer[no].logprob for answer in answers]
    assert found == pytest.approx([output.outputs.score for output in outputs], abs=1e-4)
    assert len({round(score, 3) for score in found}) == len(documents)
