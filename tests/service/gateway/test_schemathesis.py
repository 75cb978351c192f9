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
    for name in ("ChatCompletionRequest", "CompletionRequest", "MessageRequest", "ResponseRequest"):
        schemas[name]["properties"]["model"] = {"const": gateway.model}
    return narrowed


@pytest.mark.timeout(1800)  # a busy machine needs minutes for all endpoints
def test_no_documented_request_causes_a_500(
    gateway: RunningGateway, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(document_of(gateway)))
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", gateway.url]
    seed = str(pytestconfig.getoption("randomly_seed", 0))
    command += [*SHORT, "--seed", seed] if pytestconfig.option.short else FULL
    command += ["--checks", ",".join(CHECKS)]
    command += ["--continue-on-failure", "--no-shrink", "--generation-database", "none", "--request-timeout", "60"]
    command += ["--suppress-health-check", "all", "--warnings", "off"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "short_answers", "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2000:] + gateway.replicas[0].log_text()[-2000:]
    assert "0 selected" not in run.stdout
