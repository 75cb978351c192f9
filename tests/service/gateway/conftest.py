"""One worker of a tiny model and one of the default model, and gateways before them."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from clients.model import NAME, save_model_with_tools
from service.gateway.gateway_process import GatewayProcess
from service.servers import make_server
from service.workers.conftest import model_folder
from service.workers.service import Service

__all__ = ["model_folder"]


@dataclass(frozen=True)
class RunningGateway:
    """Two replicas before one queue; a test that kills anything of it starts it again."""

    service: Service
    replicas: tuple[GatewayProcess, GatewayProcess]
    model: str = "tiny"

    @property
    def url(self) -> str:
        return self.replicas[0].url


@pytest.fixture(scope="session")
def gateway(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with make_server(appendonly=True) as server:
        service = Service(server, model_folder, folder)
        replicas: list[GatewayProcess] = []
        try:
            worker = service.start_worker()
            replicas += [
                GatewayProcess(redis_url=server.url, log=folder / f"gateway-{each}.log", files=folder / "files")
                for each in "ab"
            ]
            worker.wait_ready()
            first, second = (replica.wait_ready() for replica in replicas)
            yield RunningGateway(service, (first, second))
        finally:
            for replica in replicas:
                replica.close()
            service.close()


@pytest.fixture(scope="session")
def real_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A replica before a worker of the default model, whose template here shows tools."""
    folder = tmp_path_factory.mktemp("real")
    with make_server() as server:
        service = Service(server, str(save_model_with_tools(folder)), folder)
        replica = GatewayProcess(redis_url=server.url, log=folder / "gateway.log", files=folder / "files")
        try:
            service.start_worker(served_model_name=NAME, dtype="bfloat16", kv_cache_memory="256MiB").wait_ready()
            yield RunningGateway(service, (replica.wait_ready(), replica), model=NAME)
        finally:
            replica.close()
            service.close()
