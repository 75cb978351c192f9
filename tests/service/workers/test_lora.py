"""Adapters in a real worker: several at once, one added while it runs, and after a crash."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.lora_adapters import TinyAdapter, make_adapter
from engine.tiny_models import TinyModel
from headrace_broker import Client
from service.servers import make_server
from service.workers.service import Service, results

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/lora")

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def base(model_folder: str) -> TinyModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return TinyModel("tiny", model_folder, model)


@pytest.fixture(scope="module")
def sql(base: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> TinyAdapter:
    return make_adapter(base, tmp_path_factory.mktemp("sql"), "sql", 1, targets=["q_proj", "v_proj"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def lora_service(
    model_folder: str, sql: TinyAdapter, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    with make_server() as server:
        service = Service(server, model_folder, tmp_path_factory.mktemp("service"))
        try:
            start_worker(service, sql, folder)
            yield service
        finally:
            service.close()


def start_worker(service: Service, sql: TinyAdapter, folder: Path) -> None:
    worker = service.start_worker(lora_modules=f"sql={sql.folder}", lora_dir=folder, max_loras=2, lease_seconds=1)
    worker.wait_ready()


def send(service: Service, lora: str | None, **params: Any) -> Any:
    return service.send({"prompt_token_ids": PROMPT, "lora": lora, "sampling_params": {**GREEDY, **params}})


def tokens(result: dict[str, Any]) -> list[int]:
    assert result["error"] is None
    found: list[int] = result["outputs"][0]["token_ids"]
    return found


def test_requests_of_several_adapters_run_at_once(
    lora_service: Service, base: TinyModel, sql: TinyAdapter, folder: Path
) -> None:
    late = make_adapter(base, folder / "late", "late", 2, targets=["o_proj", "up_proj"])  # while the worker runs
    expected = {
        None: base.generate(PROMPT, 8),
        "sql": sql.merged.generate(PROMPT, 8),
        "late": late.merged.generate(PROMPT, 8),
    }
    assert len(set(map(tuple, expected.values()))) == 3
    sent = {send(lora_service, name): name for name in [*expected] * 4}
    for request_id, result in results(list(sent)).items():
        name = next(name for handle, name in sent.items() if handle.id == request_id)
        assert tokens(result) == expected[name]
    with Client(lora_service.server.url, model="tiny") as client:
        request_id = client.submit(prompt_token_ids=PROMPT, sampling_params=GREEDY, lora="sql")
        assert client.result(request_id, timeout=60).outputs[0].token_ids == expected["sql"]
    metrics = lora_service.workers[-1].metrics()
    assert metrics['headrace_engine_lora_requests{adapter="sql",state="running"}'] == 0


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("unheard-of", "tiny has no LoRA adapter named 'unheard-of'"),
        ("../sql", "begin with a letter or digit"),
        ("/etc", "begin with a letter or digit"),
        (7, "begin with a letter or digit"),
    ],
)
def test_an_unknown_adapter_is_refused(lora_service: Service, lora: Any, words: str) -> None:
    result = send(lora_service, lora).get(timeout=60)
    assert result["error"]["code"] == "invalid_request"
    assert words in result["error"]["message"]


def test_a_broken_adapter_fails_only_its_own_requests(lora_service: Service, folder: Path) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / "adapter_config.json").write_text('{"peft_type": "LOHA", "r": 4, "lora_alpha": 1}')
    broken, good = send(lora_service, "broken"), send(lora_service, "sql")
    error = broken.get(timeout=60)["error"]
    assert error["code"] == "engine_error"
    assert "LoRA adapter 'broken': peft_type must be 'LORA', got 'LOHA'" in error["message"]
    assert str(folder) not in error["message"]
    assert len(tokens(good.get(timeout=60))) == 8


def test_another_worker_resumes_with_the_same_adapter(lora_service: Service, sql: TinyAdapter, folder: Path) -> None:
    handle = send(lora_service, "sql", max_tokens=900)
    lora_service.wait_tokens([handle.id], at_least=5)
    lora_service.workers[-1].process.kill()  # the worker that serves; a new one replaces it at once
    start_worker(lora_service, sql, folder)
    found = tokens(handle.get(timeout=60))
    log = lora_service.wait_ended([handle.id])[handle.id]
    assert len(log.attempts) == 2
    assert found == tokens(send(lora_service, "sql", max_tokens=900).get(timeout=60))  # an uninterrupted run
    assert found[:8] == sql.merged.generate(PROMPT, 8)
