"""Fixtures: a tiny random model, servers, and workers on them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from engine.tiny_models import save_model, save_tokenizer
from service.servers import make_server
from service.workers.service import Service

MAX_MODEL_LEN = 2048


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a random Llama of three layers. Rotary positions allow long contexts without more weights."""
    transformers_logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("tiny")
    save_model("llama", folder)
    save_tokenizer(folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": MAX_MODEL_LEN}))
    return str(folder)


@pytest.fixture(scope="session")
def shared_service(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run one server and one worker for all tests that leave them unchanged."""
    with make_server() as server:
        service = Service(server, model_folder, tmp_path_factory.mktemp("shared"))
        try:
            service.start_worker().wait_ready()
            yield service
        finally:
            service.close()


@pytest.fixture
def service(shared_service: Service) -> Service:
    """Provide the shared service without messages."""
    shared_service.wait_settled()
    shared_service.client.delete("headrace:dead:headrace.tiny")
    return shared_service


@pytest.fixture
def make_service(model_folder: str, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Make services for this test only, without workers."""
    made: list[Service] = []

    def make(*, appendonly: bool = False) -> Service:
        server = make_server(appendonly=appendonly)
        server.start()
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Service(server, model_folder, folder))
        return made[-1]

    yield make
    for service in made:
        service.close()
        service.server.close()
