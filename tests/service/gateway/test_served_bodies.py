"""What a gateway and a worker of the default model serve: every documented field, and the bodies of known clients.

The fields come from the OpenAPI document, so a new field without a sample here fails. Each is sent alone and in pairs.
"""

import asyncio
import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import httpx2
import pytest

from headrace_gateway.openapi import document, pooling_schemas
from selection import SHARES
from service.gateway.client_bodies import BODIES, Body
from service.gateway.conftest import RunningGateway

SEED: Final = 45
PAIRS: Final = 120
"""Random pairs of each endpoint. A short run takes a share of them."""
AT_ONCE: Final = 24

PAINT_SCHEMA: Final = {"type": "object", "properties": {"colour": {"enum": ["red"]}}, "required": ["colour"]}
CHAT_TOOL: Final = {"type": "function", "function": {"name": "paint", "parameters": PAINT_SCHEMA}}
RESPONSE_TOOL: Final = {"type": "function", "name": "paint", "parameters": PAINT_SCHEMA}
MESSAGE_TOOL: Final = {"name": "paint", "input_schema": PAINT_SCHEMA}
ASKED: Final = [{"role": "user", "content": "hello"}]

SAMPLES: Final[dict[str, Any]] = {
    "add_generation_prompt": True,
    "add_special_tokens": True,
    "allowed_token_ids": [5, 6, 7],
    "background": False,
    "background_options": {"completion_window": "soonest"},
    "bad_words": ["mill"],
    "best_of": 1,
    "cache_control": {"type": "ephemeral"},
    "chat_template_kwargs": {"colour": "red"},
    "completion_window": "24h",
    "context_management": {"edits": []},
    "continue_final_message": False,
    "diagnostics": {"previous_message_id": None},
    "echo": True,
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include": ["message.output_text.logprobs"],
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "input": "hello",
    "instructions": "Be brief.",
    "logit_bias": {"5": -10},
    "logprobs": True,
    "max_completion_tokens": 3,
    "max_output_tokens": 2,
    "max_tokens": 2,
    "max_tool_calls": 3,
    "messages": ASKED,
    "metadata": {"chat": "7"},
    "min_p": 0.1,
    "min_tokens": 1,
    "modalities": ["text"],
    "n": 2,
    "output_config": {"format": {"type": "json_schema", "schema": PAINT_SCHEMA}},
    "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "hello"},
    "presence_penalty": 0.5,
    "priority": 3,
    "prompt": "hello",
    "prompt_cache_key": "session 7",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "prompt_logprobs": 1,
    "questions": [{"type": "predicate", "instructions": "It is old."}],
    "reasoning": {"effort": "none", "summary": "auto"},
    "reasoning_effort": "none",
    "repetition_detection": {"max_pattern_size": 3, "min_count": 4},
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "paint", "schema": PAINT_SCHEMA}},
    "return_token_ids": True,
    "return_token_strs": True,
    "return_tokens_as_token_ids": True,
    "safety_identifier": "user-7",
    "seed": 7,
    "service_tier": "auto",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "speed": "standard",
    "stop": ["mill"],
    "stop_sequences": ["mill"],
    "stop_token_ids": [9],
    "store": False,
    "stream": True,
    "stream_interval": 2,
    "stream_options": {"include_obfuscation": False},
    "structured_outputs": {"choice": ["red", "green"]},
    "suffix": "",
    "system": "Be brief.",
    "temperature": 0.7,
    "text": {"format": {"type": "json_schema", "name": "paint", "schema": PAINT_SCHEMA}},
    "thinking": {"type": "disabled"},
    "tokens": [5, 6, 7],
    "tool_choice": "required",
    "tools": [CHAT_TOOL],
    "top_k": 20,
    "top_logprobs": 2,
    "top_p": 0.9,
    "truncation": "disabled",
    "user": "user-7",
    "verbosity": "medium",
    "vllm_xargs": {},
}
"""A value of each field that differs from its default where that is possible."""
COMPANIONS: Final = {
    "top_logprobs": ("logprobs",),
    "stream_options": ("stream",),
    "tool_choice": ("tools",),
    "add_generation_prompt": ("messages",),
    "continue_final_message": ("messages",),
}
"""Fields that are refused without others."""
EXCLUSIVE: Final = [
    {"response_format", "structured_outputs"},
    {"text", "structured_outputs"},
    *({grammar, "tools"} for grammar in ("response_format", "text", "output_config")),
    *({grammar, "tool_choice"} for grammar in ("response_format", "text", "output_config", "structured_outputs")),
]
"""Fields that are refused together."""


@dataclass(frozen=True)
class Endpoint:
    few: dict[str, Any] = field(default_factory=dict)
    """Keeps an answer short."""
    own: dict[str, Any] = field(default_factory=dict)
    """Samples of fields that mean something else here."""


COUNTED: Final = {"tools": [RESPONSE_TOOL], "stream": False, "stream_options": None}
ANTHROPIC: Final = {"tools": [MESSAGE_TOOL], "tool_choice": {"type": "any"}}
ENDPOINTS: Final = {
    "/v1/chat/completions": Endpoint({"max_tokens": 3}),
    "/v1/completions": Endpoint({"max_tokens": 3}, {"logprobs": 1}),
    "/v1/responses": Endpoint({"max_output_tokens": 3}, {"tools": [RESPONSE_TOOL]}),
    "/v1/responses/input_tokens": Endpoint(own=COUNTED),
    "/v1/messages": Endpoint(own=ANTHROPIC),
    "/v1/messages/count_tokens": Endpoint(own=ANTHROPIC),
    "/tokenize": Endpoint(),
    "/detokenize": Endpoint(),
    "/v1/batches": Endpoint(),
    "/v1/decisions": Endpoint(),
}


class Case(NamedTuple):
    path: str
    body: dict[str, Any]
    fields: tuple[str, ...]
    """The fields that the case is about."""

    @property
    def is_refused(self) -> bool:
        return any(pair <= self.body.keys() for pair in EXCLUSIVE)


def schemas_of(path: str, described: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of the body that a path takes."""
    name = path_body(described[path]).rpartition("/")[2]
    schema = document.document()["components"]["schemas"][name]
    return schema.get("anyOf", [schema])


def path_body(methods: dict[str, Any]) -> str:
    """The reference to the schema of a JSON body; empty if the path takes none."""
    content = methods.get("post", {}).get("requestBody", {}).get("content", {})
    return str(content.get("application/json", {}).get("schema", {}).get("$ref", ""))


def cases(known: dict[str, Any]) -> list[Case]:
    """Every field alone, and random pairs.

    Args:
        known: samples that only the running service has.
    """
    paths = document.document()["paths"]
    of_chats = paths.keys() - pooling_schemas.ENDPOINTS.keys()  # the others: test_embeddings.py
    assert {path for path in of_chats if path_body(paths[path])} == ENDPOINTS.keys()
    return [
        case
        for path, endpoint in ENDPOINTS.items()
        for schema in schemas_of(path, paths)
        for case in cases_of(path, schema, {**SAMPLES, **endpoint.own, **known}, endpoint.few)
    ]


def cases_of(path: str, schema: dict[str, Any], samples: dict[str, Any], few: dict[str, Any]) -> list[Case]:
    fields = set(schema["properties"])
    missing = fields - samples.keys()
    assert not missing, f"{path} has fields without a sample: {sorted(missing)}"
    least = {name: samples[name] for name in schema["required"]} | few
    pairs = list(itertools.combinations(sorted(fields - least.keys()), 2))
    chosen = random.Random(SEED).sample(pairs, min(PAIRS, len(pairs)))
    return [
        Case(path, least | {name: samples[name] for name in with_companions(names, fields)}, names)
        for names in [*((name,) for name in sorted(fields)), *chosen]
    ]


def with_companions(names: Iterable[str], fields: set[str]) -> list[str]:
    needed = [each for name in names for each in COMPANIONS.get(name, ()) if each in fields]
    return [*needed, *names]


async def problem_of(client: httpx2.AsyncClient, case: Case) -> str | None:
    """Send the request; return what is wrong with its answer."""
    answer = await client.post(case.path, json=case.body)
    told = f"{case.path} with {' and '.join(case.fields)}: {answer.status_code} {answer.text[:300]}"
    if case.is_refused:
        return None if answer.status_code == 400 else told
    return None if answer.status_code == 200 and '"error":{' not in answer.text else told


async def test_every_documented_field_is_served_alone_and_with_others(
    real_gateway: RunningGateway, pytestconfig: pytest.Config
) -> None:
    slots = asyncio.Semaphore(AT_ONCE)
    async with httpx2.AsyncClient(base_url=real_gateway.url, timeout=120) as client:

        async def checked(case: Case) -> str | None:
            async with slots:
                return await problem_of(client, case)

        chosen = cases(await samples_of_the_service(client, real_gateway.model))
        if pytestconfig.option.short:
            share = pytestconfig.getoption("randomly_seed", 0) % SHARES
            chosen = [case for number, case in enumerate(chosen) if len(case.fields) == 1 or number % SHARES == share]
        found = await asyncio.gather(*map(checked, chosen))
    problems = [problem for problem in found if problem]
    assert not problems, "\n".join(problems)


async def samples_of_the_service(client: httpx2.AsyncClient, model: str) -> dict[str, Any]:
    first = await client.post("/v1/responses", json={"model": model, "input": "hello", "max_output_tokens": 1})
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line["body"] = {"model": model, "prompt": "hello", "max_tokens": 1}  # type: ignore[assignment]
    form = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", json.dumps(line).encode())}}
    uploaded = await client.post("/v1/files", **form)  # type: ignore[arg-type]
    return {
        "model": model,
        "previous_response_id": first.json()["id"],
        "input_file_id": uploaded.json()["id"],
        "endpoint": "/v1/completions",
    }


async def test_no_body_of_a_known_client_is_refused(real_gateway: RunningGateway) -> None:
    slots = asyncio.Semaphore(AT_ONCE)
    async with httpx2.AsyncClient(base_url=real_gateway.url, timeout=300) as http:

        async def refusal_of(path: str, client: str, body: Body) -> str | None:
            async with slots:
                answer = await http.post(path, json={"model": real_gateway.model, **body})
            is_served = answer.status_code == 200 and '"error":{' not in answer.text
            return None if is_served else f"{client} at {path}: {answer.status_code} {answer.text[:300]}"

        found = await asyncio.gather(*(refusal_of(*each) for each in BODIES))
    assert len(BODIES) >= 60
    assert not (refusals := [each for each in found if each]), "\n".join(refusals)
