"""Rerank, score, classify, Cohere's and TEI's APIs through a gateway, Redis and workers of two tiny models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.pooling.tiny_pooling_models import NORMALIZE, add_modules, build, pooling
from headrace_gateway.openapi import document, pooling_schemas
from service.gateway.gateway_process import GatewayProcess
from service.gateway.test_schemathesis import assert_no_500
from service.servers import make_server
from service.workers.service import DEADLINE, Service

CROSS, BI = "cross", "bi"
LONG = "mill " * 600


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("pooling")
    build(folder / "bi", "bert")
    add_modules(folder / "bi", [pooling(), NORMALIZE])
    build(folder / "cross", "bert", suffix="ForSequenceClassification", config={"num_labels": 1})
    with make_server() as server:
        service = Service(server, str(folder / "bi"), folder)
        replica = GatewayProcess(redis_url=server.url, log=folder / "gateway.log", files=folder / "files")
        try:
            workers = [
                service.start_worker(model=str(folder / name), served_model_name=name, dtype="float32")
                for name in (BI, CROSS)
            ]
            for worker in workers:
                worker.wait_ready()
            yield replica.wait_ready()
        finally:
            replica.close()
            service.close()


@pytest.fixture(scope="module")
def http(replica: GatewayProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=replica.url, timeout=DEADLINE) as client:
        yield client


SAMPLES: dict[str, Any] = {
    "activation": False,
    "add_special_tokens": False,
    "data_1": "mill",
    "data_2": ["river", "wheel"],
    "dimensions": 32,
    "documents": ["river", "wheel"],
    "embedding_types": ["float", "ubinary", "base64"],
    "encoding_format": "base64",
    "input": ["mill", "river"],
    "input_type": "search_query",
    "inputs": ["mill", "river"],
    "items": ["river", "wheel"],
    "max_tokens": 9,
    "max_tokens_per_doc": 4096,
    "normalize": False,
    "output_dimension": 32,
    "priority": 3,
    "prompt": "query: ",
    "queries": "mill",
    "query": "mill",
    "raw_scores": True,
    "return_documents": True,
    "return_text": True,
    "softmax": False,
    "text_1": "mill",
    "text_2": ["river", "wheel"],
    "texts": ["river", "wheel"],
    "top_n": 1,
    "truncate": True,
    "truncate_prompt_tokens": 9,
    "truncation": True,
    "truncation_direction": "Left",
    "truncation_side": "left",
    "use_activation": False,
    "user": "someone",
}
OWN = {
    path: {"truncate": "START", "inputs": [{"content": [{"type": "text", "text": "mill"}]}]}
    for path in ("/v1/embed", "/v2/embed")
}
BESIDE = {
    "truncation_side": ("truncate_prompt_tokens",),
    "text_1": ("text_2",),
    "text_2": ("text_1",),
    "data_1": ("data_2",),
    "data_2": ("data_1",),
    "items": ("queries",),
    "queries": ("documents",),
    "documents": ("queries",),
}
INPUTS = {
    "/v1/embed": ("texts",),
    "/v2/embed": ("texts",),
    "/score": ("text_1", "text_2"),
    "/v1/score": ("text_1", "text_2"),
}
SIDES = {"text_1", "text_2", "data_1", "data_2", "items", "queries", "documents", "texts", "inputs"}
NOT_OF_THESE_MODELS = {"prompt_name"}
"""The tiny folders have no prompts."""
CASES = [
    (path, number, name)
    for path, (request, _, _) in pooling_schemas.ENDPOINTS.items()
    for number, schema in enumerate(pooling_schemas.SCHEMAS[request].get("anyOf", [pooling_schemas.SCHEMAS[request]]))
    for name in sorted(schema["properties"].keys() - NOT_OF_THESE_MODELS)
]


@pytest.mark.parametrize(("path", "number", "name"), CASES)
def test_every_documented_field_is_served_alone(http: httpx2.Client, path: str, number: int, name: str) -> None:
    request = pooling_schemas.SCHEMAS[pooling_schemas.ENDPOINTS[path][0]]
    schema = request.get("anyOf", [request])[number]
    model = BI if "embed" in path else CROSS
    samples = {**SAMPLES, **OWN.get(path, {}), "model": model}
    names = [*schema["required"], *BESIDE.get(name, ()), name]
    if path in INPUTS and name not in SIDES:
        names += INPUTS[path]
    if path.endswith("/rerank"):
        names = [each for each in names if each != "queries"]
    body = {each: samples[each] for each in names}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text


def test_a_ranking_is_the_same_on_all_paths(http: httpx2.Client) -> None:
    body = {"model": CROSS, "query": "mill", "documents": ["river", "wheel", "mill"]}
    found = [http.post(path, json=body).json()["results"] for path in ("/rerank", "/v1/rerank", "/v2/rerank")]
    assert found[0] == found[1] == found[2]
    scores = [each["relevance_score"] for each in found[0]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    pairs = http.post("/score", json={"model": CROSS, "text_1": "mill", "text_2": body["documents"]}).json()["data"]
    for each in found[0]:
        assert pairs[each["index"]]["score"] == pytest.approx(each["relevance_score"], abs=1e-6)
    of_tei = http.post("/rerank", json={"query": "mill", "texts": body["documents"]}).json()
    assert [each["index"] for each in of_tei] == [each["index"] for each in found[0]]


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        (
            "/v1/rerank",
            {"model": BI, "query": "a", "documents": ["b"]},
            400,
            "model 'bi' computes embeddings; it does not",
        ),
        ("/v1/embeddings", {"model": CROSS, "input": "a"}, 400, "does not compute embeddings: use /v1/rerank"),
        ("/v1/completions", {"model": CROSS, "prompt": "a"}, 400, "it does not generate"),
        ("/v1/rerank", {"model": "none", "query": "a", "documents": ["b"]}, 404, "does not exist"),
        ("/v2/embed", {"model": BI, "texts": ["a"], "output_dimension": 8}, 400, "output_dimension must be"),
        ("/v1/embeddings", {"model": BI, "input": LONG}, 400, "send less text, or truncate_prompt_tokens: -1"),
        ("/v2/embed", {"model": BI, "texts": [LONG], "truncate": "NONE"}, 400, 'or truncate: "END"'),
    ],
)
def test_errors_name_what_to_do(http: httpx2.Client, path: str, body: Any, status: int, told: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"model": BI, "input": LONG}, "input[0]"),
        ("/v1/embeddings", {"model": BI, "input": ["mill"] * 299 + [LONG]}, "input[299]"),
        ("/v2/embed", {"model": BI, "texts": ["mill", LONG], "truncate": "NONE"}, "texts[1]"),
        (
            "/v1/rerank",
            {"model": CROSS, "query": "mill", "documents": ["a", LONG], "truncation": False},
            "documents[1]",
        ),
    ],
)
def test_an_input_that_is_too_long_is_named_by_its_field_and_index(
    http: httpx2.Client, path: str, body: Any, param: str
) -> None:
    error = http.post(path, json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert f"{param} has " in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"model": BI, "input": "a", "dimensions": 8}, "dimensions"),
        ("/v2/embed", {"model": BI, "texts": ["a"], "output_dimension": 8}, "output_dimension"),
        ("/v1/embeddings", {"model": BI, "input": "a", "prompt_name": "nobody"}, "prompt_name"),
    ],
)
def test_a_field_that_the_model_refuses_is_named(http: httpx2.Client, path: str, body: Any, param: str) -> None:
    error = http.post(path, json=body).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", param)
    assert error["message"].startswith(f"{param} ")


def test_tei_errors_are_in_its_format(http: httpx2.Client) -> None:
    long = http.post("/embed", json={"inputs": ["mill", LONG]})
    assert (long.status_code, long.json()["error_type"]) == (413, "validation")
    assert "inputs[1] has" in long.json()["error"]
    assert long.json()["error"].endswith("or truncate: true")
    wrong = http.post("/rerank", params={"model": BI}, json={"query": "a", "texts": ["b"]})
    assert (wrong.status_code, wrong.json()["error_type"]) == (424, "backend")


def test_the_paths_are_in_the_document() -> None:
    assert pooling_schemas.ENDPOINTS.keys() <= document.document()["paths"].keys()


def document_of() -> dict[str, Any]:
    """Return the document of the pooling paths, restricted to requests to the tiny models.

    The headers are left out: they are those of chats.
    """
    served: dict[str, Any] = json.loads(json.dumps(document.document()))
    served["paths"] = {path: served["paths"][path] for path in pooling_schemas.ENDPOINTS}
    for operations in served["paths"].values():
        del operations["post"]["parameters"]
    for path, (name, _, _) in pooling_schemas.ENDPOINTS.items():
        request = served["components"]["schemas"][name]
        for one in request.get("anyOf", [request]):
            if "model" in one["properties"]:
                names = [BI if "embed" in path else CROSS, *([] if "model" in one["required"] else [None])]
                one["properties"]["model"] = {"enum": names}
    return served


@pytest.mark.timeout(1800)  # a busy machine needs minutes for all endpoints
def test_no_documented_request_causes_a_500(
    replica: GatewayProcess, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    assert_no_500(document_of(), replica, tmp_path, pytestconfig)
