"""Rerank, score, classify, Cohere's embed and TEI's APIs: bodies become the queue's arguments, rows become answers."""

import struct
from collections.abc import Callable
from typing import Any

import pytest

from headrace_broker import RegisteredModel
from headrace_broker.pooling_results import Matrix, Pooled
from headrace_broker.results import Usage
from headrace_gateway.errors import ApiError
from headrace_gateway.http.tei_errors import tei_error
from headrace_gateway.pooling.classes import read_classify
from headrace_gateway.pooling.cohere import read_embed, read_embed_v1, write_embed, write_rows
from headrace_gateway.pooling.pooling_body import PoolingBody
from headrace_gateway.pooling.rerank import read_rerank
from headrace_gateway.pooling.scores import read_score
from headrace_gateway.pooling.tei import read_predict, read_tei_embed

MODEL = RegisteredModel(
    "m",
    64,
    1.0,
    "w",
    tasks=("embed", "score", "classify"),
    dimensions=8,
    max_input_tokens=64,
    prompts=("query", "passage"),
)
RERANK = {"query": "q", "documents": ["a", "b", "c"]}
Reader = Callable[..., PoolingBody]


def pooled(*rows: Any, labels: Any = ()) -> Pooled:
    numbers = [number for row in rows for number in (row if isinstance(row, list) else [row])]
    shape = (len(rows), len(rows[0])) if isinstance(rows[0], list) else (len(rows),)
    data = Matrix(struct.pack(f"<{len(numbers)}f", *numbers), shape)
    return Pooled(data, list(labels), [], Usage(7, 0, 0), ["r1"])


def refusal(read: Reader, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read({"model": "m", **body}, model=MODEL)
    return caught.value


def given(read: Reader, body: dict[str, Any]) -> Any:
    return read({"model": "m", **body}, model=MODEL).given


def test_a_ranking_is_sorted_and_has_no_documents_unless_asked_for() -> None:
    answer = read_rerank({"model": "m", **RERANK}, model=MODEL).answer(pooled(0.25, 0.5, 0.5), "rerank-1")
    assert [(each["index"], each["relevance_score"]) for each in answer["results"]] == [(1, 0.5), (2, 0.5), (0, 0.25)]
    assert all("document" not in each for each in answer["results"])
    assert (answer["id"], answer["model"], answer["usage"]["total_tokens"]) == ("rerank-1", "m", 7)
    assert answer["meta"]["billed_units"] == {"search_units": 1}


def test_a_ranking_has_the_best_documents_if_asked_for() -> None:
    body = {**RERANK, "documents": ["a", {"text": "b"}, "c"], "top_n": 1, "return_documents": True}
    answer = read_rerank(body, model=MODEL).answer(pooled(0.25, 0.5, 0.0), "r")
    assert answer["results"] == [{"index": 1, "relevance_score": 0.5, "document": {"text": "b"}}]


@pytest.mark.parametrize("top_n", [0, 9, None])
def test_a_ranking_has_all_documents_without_a_smaller_top_n(top_n: int | None) -> None:
    answer = read_rerank({**RERANK, "top_n": top_n}, model=MODEL).answer(pooled(0.25, 0.5, 0.0), "r")
    assert len(answer["results"]) == 3


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"query": ""}, "query must be"),
        ({"query": None}, "query must be given"),
        ({"documents": ["a", ""]}, "documents[1] must not be empty"),
        ({"documents": [{"title": "a"}]}, "documents[0].text must be a string"),
        ({"top_k": 3}, "use top_n"),
        ({"texts": ["a"]}, "give documents, or TEI's fields alone"),
        ({"max_tokens_per_doc": 8}, "max_tokens_per_doc must be at least the model's limit of 64 tokens, got 8"),
        ({"rank_fields": ["title"]}, "rank_fields is not supported"),
    ],
)
def test_a_wrong_rerank_is_refused(fields: dict[str, Any], told: str) -> None:
    assert told in refusal(read_rerank, {**RERANK, **fields}).message


def test_fields_of_cohere_jina_and_vllm_are_read() -> None:
    assert given(read_rerank, {**RERANK, "rank_fields": ["text"], "max_tokens_per_doc": 4096, "truncation": False}) == {
        **RERANK, "truncate": "error",
    }  # fmt: skip
    assert given(read_rerank, {**RERANK, "raw_scores": True})["activation"] is False
    assert read_rerank({"model": "m", **RERANK, "priority": 700}, model=MODEL).priority == 9


@pytest.mark.parametrize(
    ("names", "sides", "sent"),
    [
        (("text_1", "text_2"), ("a", "b"), (["a"], ["b"])),
        (("queries", "documents"), ("a", ["b", "c"]), (["a"], ["b", "c"])),
        (("queries", "items"), (["a", "b"], ["c", "d"]), (["a", "b"], ["c", "d"])),
        (("data_1", "data_2"), ("a", ["b"]), (["a"], ["b"])),
    ],
)
def test_each_pair_of_names_is_scored(names: Any, sides: Any, sent: Any) -> None:
    found = given(read_score, dict(zip(names, sides, strict=True)))
    assert (found["queries"], found["documents"]) == sent


def test_pairs_that_do_not_fit_are_refused_with_both_counts() -> None:
    error = refusal(read_score, {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]})
    assert error.message.startswith("text_1 has 2 texts, text_2 3")
    assert "exactly one pair of" in refusal(read_score, {"text_1": "a"}).message


def test_scores_keep_the_order_of_the_pairs() -> None:
    body = read_score({"model": "m", "text_1": "a", "text_2": ["b", "c"]}, model=MODEL)
    assert [each["score"] for each in body.answer(pooled(0.25, 0.75), "s")["data"]] == [0.25, 0.75]


def test_a_classification_names_the_best_label() -> None:
    body = read_classify({"model": "m", "input": ["a"], "use_activation": True}, model=MODEL)
    (found,) = body.answer(pooled([0.25, 0.75], labels=("no", "yes")), "c")["data"]
    assert found == {"index": 0, "label": "yes", "probs": [0.25, 0.75], "num_classes": 2}


@pytest.mark.parametrize(
    ("input_type", "prompt"),
    [("search_query", {"prompt_name": "query"}), ("search_document", {"prompt_name": "passage"}), ("clustering", {})],
)
def test_cohere_types_of_input_choose_a_prompt_that_the_model_has(input_type: str, prompt: dict[str, str]) -> None:
    assert given(read_embed, {"texts": ["a"], "input_type": input_type}) == {
        "input": ["a"], "truncate": "end", **prompt,
    }  # fmt: skip


def test_cohere_embeddings_have_the_types_that_were_asked_for() -> None:
    row = [1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 1.0]
    kinds = ["float", "binary", "ubinary", "base64"]
    body = read_embed({"model": "m", "texts": ["a"], "embedding_types": kinds}, model=MODEL)
    found = body.answer(pooled(row), "e")["embeddings"]
    assert list(found) == kinds
    assert (found["float"], found["ubinary"], found["binary"]) == ([row], [[0b10100001]], [[0b10100001 - 128]])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"texts": ["a"], "embedding_types": ["int8"]}, "int8 needs the model's ranges"),
        ({"texts": ["a"], "embedding_types": ["binary"], "output_dimension": 4}, "require a multiple of 8 dimensions"),
        ({"texts": ["a"], "images": ["x"]}, "only text is supported"),
        ({}, "exactly one of texts, inputs must be given"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, "only text is supported"),
        ({"texts": ["a", ""]}, "texts[1] must not be empty"),
    ],
)
def test_a_wrong_embed_is_refused(fields: dict[str, Any], told: str) -> None:
    assert told in refusal(read_embed, fields).message


def test_tei_rerank_is_told_by_its_texts() -> None:
    body = read_rerank({"query": "q", "texts": ["a", "b"], "return_text": True}, model=MODEL)
    assert body.given["truncate"] == "error"
    assert body.answer(pooled(0.25, 0.5), "r") == [
        {"index": 1, "score": 0.5, "text": "b"},
        {"index": 0, "score": 0.25, "text": "a"},
    ]


@pytest.mark.parametrize(
    ("inputs", "sent"),
    [
        ("a", ["a"]),
        (["a", "b"], [["a", "b"]]),
        ([["a"], ["a", "b"]], ["a", ["a", "b"]]),
    ],
)
def test_two_texts_of_predict_are_one_pair(inputs: Any, sent: Any) -> None:
    assert given(read_predict, {"inputs": inputs})["input"] == sent


def test_predictions_are_sorted_and_nested_for_a_batch_only() -> None:
    rows = pooled([0.25, 0.75], labels=("no", "yes"))
    best = [{"score": 0.75, "label": "yes"}, {"score": 0.25, "label": "no"}]
    assert read_predict({"inputs": "a"}, model=MODEL).answer(rows, "p") == best
    assert read_predict({"inputs": [["a"]]}, model=MODEL).answer(rows, "p") == [best]


def test_tei_cuts_only_if_asked_to() -> None:
    assert given(read_tei_embed, {"inputs": "a"})["truncate"] == "error"
    assert given(read_tei_embed, {"inputs": "a", "truncate": True})["truncate"] == "end"
    assert (
        given(read_tei_embed, {"inputs": "a", "truncate": True, "truncation_direction": "Left"})["truncate"] == "start"
    )


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"inputs": [""]}, 400, "empty"),
        ({"inputs": ["a"] * 2049}, 413, "validation"),
        ({"inputs": 3}, 422, "validation"),
    ],
)
def test_tei_errors_have_its_status_and_type(fields: dict[str, Any], status: int, kind: str) -> None:
    body, found = tei_error(refusal(read_tei_embed, fields))
    assert (found, body["error_type"]) == (status, kind)


def test_the_first_version_of_cohere_has_plain_rows_unless_types_are_asked_for() -> None:
    plain = read_embed_v1({"model": "m", "texts": ["a"]}, model=MODEL)
    typed = read_embed_v1({"model": "m", "texts": ["a"], "embedding_types": ["float"]}, model=MODEL)
    assert plain.write is write_rows
    assert typed.write is write_embed
