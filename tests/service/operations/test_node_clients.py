"""The Celery clients of npm with a real worker: celery-node and celery-ts, which support only JSON.

They have the rights of the user `client` in docker-compose.yml.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.redis_users import ServerWithUsers, url_of, users
from service.workers.conftest import model_folder
from service.workers.service import QUEUE, Service

pytestmark = pytest.mark.rotated_file

__all__ = ["model_folder"]

PACKAGES = ["celery-node@0.5.9", "celery-ts@1.2.3"]

CELERY_NODE = """
const celery = require("celery-node");
const { url, queue, kwargs, protocol } = JSON.parse(process.argv[2]);
const client = celery.createClient(url, url, queue);
client.conf.TASK_PROTOCOL = protocol;
(async () => {
  const result = await client.sendTask("headrace.generate", [], kwargs).get(60000);
  console.log(JSON.stringify(result));
  await client.disconnect();
})();
"""

CELERY_TS = """
const Celery = require("celery-ts");
const { url, queue, kwargs, options } = JSON.parse(process.argv[2]);
const client = Celery.createClient({ brokerUrl: url, resultBackend: url });
(async () => {
  const task = client.createTask("headrace.generate");
  // it asks for a result once, and then relies on its subscription, which must be there first
  await task.applyAsync({ args: [], kwargs: { prompt: "x" }, queue, routingKey: queue }).get(60000);
  const result = task.applyAsync({ args: [], kwargs, queue, routingKey: queue, ...options });
  console.log(JSON.stringify(await result.get(60000)));
  process.exit(0); // its disconnect() does not end its own subscription
})();
"""

KWARGS = {
    "messages": [{"role": "user", "content": "Größe? 大きさ 👋"}],
    "sampling_params": {"max_tokens": 4, "ignore_eos": True, "logprobs": 1, "logit_bias": {"7": 100}, "temperature": 0},
}


@pytest.fixture(scope="module")
def service(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("node-service")
    with ServerWithUsers(folder) as server:
        made = Service(server, model_folder, folder, url=url_of(server, "admin"))
        try:
            made.start_worker(redis_url=url_of(server, "worker")).wait_ready()
            yield made
        finally:
            made.close()


def url_for(service: Service) -> str:
    """Return the URL for celery-node, whose ioredis ignores the user's name without this option."""
    return f"{url_of(service.server, 'client')}?allowUsernameInURI=true"


@pytest.fixture(scope="module")
def url_without_name(service: Service) -> str:
    """The URL for celery-ts, which supports no user names, and subscribes to all results of the server."""
    service.client.execute_command("ACL", "SETUSER", "default", "reset", *users()["client"], "+psubscribe")
    return f"redis://:secret@127.0.0.1:{service.server.port}/0"


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages, installed from the registry."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("Node.js is not installed; `make ops-tools` installs it if it can")
    folder = tmp_path_factory.mktemp("node")
    quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "--prefix", str(folder)]
    done = subprocess.run([npm, "install", *quiet, *PACKAGES], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"npm could not install {' and '.join(PACKAGES)}: {done.stderr[-300:]}")
    return folder


def node(folder: Path, program: str, **given: Any) -> dict[str, Any]:
    """Run the client; return the result that it got."""
    script = folder / "client.js"
    script.write_text(program, encoding="utf-8")
    command = ["node", script.name, json.dumps({"queue": QUEUE, "kwargs": KWARGS, **given})]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def assert_served(service: Service, result: dict[str, Any]) -> None:
    assert result["error"] is None
    assert result["outputs"][0]["token_ids"] == [7, 7, 7, 7]
    assert len(result["outputs"][0]["logprobs"]) == 4
    service.wait_settled()
    assert service.dead_letters() == []


@pytest.mark.parametrize("protocol", [1, 2])
def test_celery_node_is_served(service: Service, modules: Path, protocol: int) -> None:
    assert_served(service, node(modules, CELERY_NODE, url=url_for(service), protocol=protocol))


def test_celery_node_reads_a_refusal(service: Service, modules: Path) -> None:
    result = node(modules, CELERY_NODE, url=url_for(service), protocol=2, kwargs={"prompt": "x", "colour": 1})
    assert result["error"] == {"code": "invalid_request", "message": "unknown key 'colour'"}


@pytest.mark.parametrize("options", [{}, {"priority": 0}], ids=str)
def test_celery_ts_is_served(service: Service, modules: Path, url_without_name: str, options: dict[str, Any]) -> None:
    assert_served(service, node(modules, CELERY_TS, url=url_without_name, options=options))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"serializer": "yaml"}, "application/x-yaml"), ({"compression": "zlib"}, "compressed")],
    ids=str,
)
def test_celery_ts_reads_why_its_message_is_refused(
    service: Service, modules: Path, url_without_name: str, options: dict[str, Any], words: str
) -> None:
    result = node(modules, CELERY_TS, url=url_without_name, options=options)
    assert words in result["error"]["message"]
    service.client.delete("headrace:dead:headrace.tiny")
