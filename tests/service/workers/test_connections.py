"""A whole service over every kind of connection: the worker, both clients, the exporter and `headrace top`."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace_broker.app import make_app
from headrace_broker.client.async_client import AsyncClient
from headrace_broker.client.client import Client
from headrace_broker.errors import QueueUnavailableError
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import free_port
from headrace_broker.settings import BrokerSettings
from headrace_cli.exporter import Exporter
from headrace_cli.service_sampler import ServiceSampler, report
from service.certificates import Certificates, needs_openssl
from service.servers import EVERY_PROGRAM, REDIS, make_server, needs_redis_server
from service.workers.service import Service

pytestmark = pytest.mark.rotated_file

VERIFY_FAILED = r"(?i)certificate.verify.failed"
PARAMS = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def assert_serves(url: str) -> None:
    """Assert that both clients, the exporter and top work over this connection, with a worker on the other side."""
    with Client(url, model="tiny") as client:
        request_id = client.submit("the wheel", PARAMS)
        chunks = list(client.stream(request_id, timeout=60))
        assert sum(len(chunk.token_ids) for chunk in chunks) == 12
        assert client.result(request_id, timeout=60).outputs[0].text == "".join(chunk.text for chunk in chunks)
        many = client.submit_many({"prompt": "the wheel", "sampling_params": PARAMS} for _ in range(3))
        assert {one for one, event in client.events_many(many, timeout=60)} == set(many)
        assert not client.cancel(many[0])
    with connect(url) as reader:
        exporter = Exporter(reader, port=0)
        exporter.poll()
        assert re.search(rb"headrace_exporter_redis_up{server=.*} 1.0", exporter.exposition.exposition())
        with make_app(BrokerSettings(url)) as app:
            seen = report(ServiceSampler(reader, app, answer_seconds=10).sample(), None)
        assert [worker["model"] for worker in seen["workers"]] == ["tiny"]


async def assert_serves_async(url: str) -> None:
    async with AsyncClient(url, model="tiny") as client:
        request_id = await client.submit("the wheel", PARAMS)
        assert sum([len(chunk.token_ids) async for chunk in client.stream(request_id, timeout=60)]) == 12
        assert (await client.result(request_id, timeout=60)).error is None


@pytest.mark.parametrize("program", EVERY_PROGRAM)
async def test_over_a_unix_socket(program: str, model_folder: str, tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,  # Redis names a client by the first characters of its path only
        make_server(program=program, arguments=["--unixsocket", f"{folder}/s"]) as server,
    ):
        path = Path(folder) / "s"
        service = Service(server, model_folder, tmp_path)
        try:
            worker = service.start_worker(redis_url=f"unix://{path}?db=1").wait_ready()
            assert_serves(f"redis+socket://{path}?virtual_host=1")
            await assert_serves_async(f"unix://{path}?db=1")
            with connect(f"{server.url[:-1]}1") as client:
                addresses = [line["addr"] for line in client.client_list() if line["db"] == "1"]
                assert sum(str(path) in address for address in addresses) >= 6, addresses
            assert "Traceback" not in worker.log_text()
        finally:
            service.close()


@dataclass(frozen=True)
class TlsService:
    certificates: Certificates
    port: int
    service: Service

    def url(self, ca: str | None, *, client: bool = True) -> str:
        files = {"ssl_ca_certs": ca} if ca else {}
        if client:
            files |= {"ssl_certfile": self.certificates.client, "ssl_keyfile": self.certificates.client_key}
        return f"rediss://127.0.0.1:{self.port}/0?" + "&".join(f"{name}={file}" for name, file in files.items())


@pytest.fixture(scope="module", params=[False, True], ids=["server certificate", "client certificates"])
def tls(
    request: pytest.FixtureRequest, model_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TlsService]:
    assert REDIS is not None
    certificates = Certificates.make(tmp_path_factory.mktemp("certificates"))
    port = free_port()
    arguments = [*certificates.server_arguments(port, clients=request.param), "--bind", "127.0.0.1", "127.0.0.2"]
    with ExitStack() as stack:
        server = stack.enter_context(make_server(program=REDIS, arguments=arguments))
        service = Service(server, model_folder, tmp_path_factory.mktemp("tls"))
        stack.callback(service.close)
        found = TlsService(certificates, port, service)
        service.start_worker(redis_url=found.url(certificates.ca, client=request.param))
        yield found


@needs_redis_server
@needs_openssl
async def test_requests_are_served_over_tls(tls: TlsService, request: pytest.FixtureRequest) -> None:
    worker = tls.service.workers[0].wait_ready()
    url = tls.url(tls.certificates.ca, client="client certificates" in request.node.name)
    assert_serves(url)
    await assert_serves_async(url)
    assert "Traceback" not in worker.log_text()


@needs_redis_server
@needs_openssl
def test_a_server_with_an_untrusted_certificate_is_refused_with_the_reason(tls: TlsService) -> None:
    for ca in (tls.certificates.other_ca, None):
        # another name, because kombu shares connections of a process that differ only in TLS
        url = tls.url(ca).replace("127.0.0.1", "localhost")
        with Client(url, model="tiny", check_model=False) as client:
            for action in (lambda: client.submit("the wheel", PARAMS), client.models):
                with pytest.raises(QueueUnavailableError, match=VERIFY_FAILED) as refusal:
                    action()
                assert tls.certificates.client_key not in str(refusal.value)
    worker = tls.service.start_worker(redis_url=tls.url(tls.certificates.other_ca))
    try:
        worker.wait_for_log(VERIFY_FAILED)
        assert worker.process.poll() is None, "a worker outlives a wrong certificate, which may be put right"
    finally:
        worker.close()


@needs_redis_server
@needs_openssl
def test_a_name_that_is_not_the_certificates_is_refused_unless_the_check_is_off(tls: TlsService) -> None:
    tls.service.workers[0].wait_ready()
    url = tls.url(tls.certificates.ca).replace("127.0.0.1", "127.0.0.2")
    with Client(url) as client, pytest.raises(QueueUnavailableError, match=r"not valid for"):
        client.models()
    with Client(f"{url}&ssl_check_hostname=false") as client:
        assert list(client.models()) == ["tiny"]


@needs_redis_server
@needs_openssl
def test_a_client_without_a_certificate_is_refused_if_the_server_requires_one(
    tls: TlsService, request: pytest.FixtureRequest
) -> None:
    tls.service.workers[0].wait_ready()
    with Client(tls.url(tls.certificates.ca, client=False)) as client:
        if "client certificates" in request.node.name:
            with pytest.raises(QueueUnavailableError):
                client.models()
        else:
            assert list(client.models()) == ["tiny"]
