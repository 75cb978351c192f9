"""schemathesis with the gateway's own OpenAPI document: no response is a 500, and each matches the document."""

import copy
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.openapi import pooling_schemas
from service.gateway.conftest import RunningGateway
from service.gateway.gateway_process import GatewayProcess

FULL = ["--seed", "7", "--phases", "examples,coverage,fuzzing", "--max-examples", "25"]
SHORT = ["--phases", "examples,fuzzing", "--max-examples", "4"]
"""In a short run, with the seed of pytest-randomly."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "allow_header_conformance",
)
"""Not positive_data_acceptance: the document omits the rules between fields."""
REFUSALS = [400, 404, 405, 413, 415, 422, 424, 429, "5xx"]
"""The statuses of invalid requests. TEI's are 413 and 424."""


def document_of(gateway: RunningGateway) -> dict[str, Any]:
    """Return the served document, restricted to requests to the tiny model."""
    with urllib.request.urlopen(f"{gateway.url}/openapi.json") as response:
        document: dict[str, Any] = json.load(response)
    narrowed = copy.deepcopy(document)
    for path in pooling_schemas.ENDPOINTS:
        del narrowed["paths"][path]  # the tiny model generates
    schemas = narrowed["components"]["schemas"]
    schemas["MessageTokensRequest"]["properties"]["model"] = {"const": gateway.model}
    for one in (schemas["DetokenizedRequest"], *schemas["TokenizedRequest"]["anyOf"]):
        one["properties"]["model"] = {"enum": [gateway.model, None]}
    for name in ("ChatCompletionRequest", "CompletionRequest", "MessageRequest", "ResponseRequest", "DecisionRequest"):
        schemas[name]["properties"]["model"] = {"const": gateway.model}
    return narrowed


def assert_no_500(document: dict[str, Any], gateway: GatewayProcess, folder: Path, config: pytest.Config) -> None:
    """Send random requests that the document allows, and some that it does not."""
    path = folder / "openapi.json"
    path.write_text(json.dumps(document))
    (folder / "schemathesis.toml").write_text(f"[checks]\nnegative_data_rejection.expected-statuses = {REFUSALS}\n")
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", gateway.url]
    seed = str(config.getoption("randomly_seed", 0))
    command += [*SHORT, "--seed", seed] if config.option.short else FULL
    command += ["--checks", ",".join(CHECKS)]
    command += ["--continue-on-failure", "--no-shrink", "--generation-database", "none", "--request-timeout", "60"]
    command += ["--suppress-health-check", "all", "--warnings", "off"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "short_answers", "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2000:] + gateway.log_text()[-2000:]
    assert " 0 selected" not in run.stdout


@pytest.mark.timeout(1800)  # a busy machine needs minutes for all endpoints
def test_no_documented_request_causes_a_500(
    gateway: RunningGateway, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    assert_no_500(document_of(gateway), gateway.replicas[0], tmp_path, pytestconfig)
