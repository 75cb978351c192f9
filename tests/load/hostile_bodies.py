"""Bodies of 4 MiB that are slow to parse or to check, for the endpoints that generate."""

import json
from collections.abc import Iterator

_BYTES = 4 * 2**20 - 2**12
_USER = '{"role":"user","content":"a"}'
_CHAT = f'"model":"tiny","messages":[{_USER}]'


def _filled(before: str, unit: str, after: str) -> bytes:
    count = (_BYTES - len(before) - len(after)) // (len(unit) + 1)
    return (before + ",".join([unit] * count) + after).encode()


def _numbered(before: str, pair: str, after: str) -> bytes:
    count = _BYTES // (len(pair % 100_000) + 1)
    return (before + ",".join(pair % number for number in range(count)) + after).encode()


def hostile_bodies() -> Iterator[tuple[str, bytes]]:
    """Yield paths and bodies."""
    chat, completion, response = "/v1/chat/completions", "/v1/completions", "/v1/responses"
    call = '{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
    open_chat = f"{{{_CHAT},"
    yield chat, _filled('{"model":"tiny","messages":[', _USER, "]}")
    yield chat, _filled('{"model":"tiny","messages":[', "{}", "]}")
    yield chat, _filled('{"model":"tiny","messages":[{"role":"assistant","tool_calls":[', call, "]}]}")
    yield chat, _filled('{"model":"tiny","messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}")
    yield chat, _filled(f'{open_chat}"a":[', "[" * 10 + "]" * 10, "]}")
    yield chat, _filled(f'{open_chat}"chat_template_kwargs":{{"a":[', "{}", "]}}")
    yield chat, _filled(f'{open_chat}"tools":[', '{"type":"function","function":{"name":"f"}}', "]}")
    yield chat, _filled(f'{open_chat}"bad_words":[', '"a"', "]}")
    yield chat, _numbered(f'{open_chat}"logit_bias":{{', '"%d":1', "}}")
    yield chat, _numbered(open_chat, '"k%d":1', "}")
    yield chat, _numbered(open_chat, '"[%d]":1', "}")
    schema = (
        f'{open_chat}"response_format":{{"type":"json_schema","json_schema":{{"name":"a","schema":{{"properties":{{'
    )
    yield chat, _numbered(schema, '"%d":{"type":"string"}', "}}}}}")
    yield completion, _filled('{"model":"tiny","max_tokens":0,"prompt":[', "1", "]}")
    yield completion, _filled('{"model":"tiny","max_tokens":0,"prompt":[', "[]", "]}")
    yield response, _filled('{"model":"tiny","input":[', '{"type":"message","role":"user","content":"a"}', "]}")
    yield response, _filled('{"model":"tiny","input":[', f'{{"type":"item_reference","id":"msg_{7:032}_0"}}', "]}")
    yield chat, json.dumps({"model": "tiny", "messages": "\u00e9" * (_BYTES // 6)}).encode()
