"""Bodies as SDKs, agents, editors and front ends send them: the fields are theirs, the texts and limits are ours."""

from typing import Any, Final

Body = dict[str, Any]

USER: Final[Body] = {"role": "user", "content": "List the files."}
SYSTEM: Final[Body] = {"role": "system", "content": "You are a helpful assistant."}
TURNS: Final = [SYSTEM, USER]
PATH: Final[Body] = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
CLOSED: Final[Body] = {**PATH, "additionalProperties": False}
FUNCTION: Final[Body] = {"name": "list_files", "description": "Lists the files of a folder.", "parameters": PATH}
TOOL: Final[Body] = {"type": "function", "function": FUNCTION}
STRICT_TOOL: Final[Body] = {"type": "function", "function": {**FUNCTION, "parameters": CLOSED, "strict": True}}
FLAT_TOOL: Final[Body] = {"type": "function", **FUNCTION, "strict": False}
CALL: Final[Body] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "list_files", "arguments": '{"path": "."}'},
}
CALLED: Final = [
    *TURNS,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"},
]
JSON_SCHEMA: Final[Body] = {
    "type": "json_schema",
    "json_schema": {"name": "files", "schema": CLOSED, "strict": True},
}
TEXT_FORMAT: Final[Body] = {"format": {"type": "json_schema", "name": "files", "schema": CLOSED, "strict": True}}
USAGE: Final[Body] = {"stream": True, "stream_options": {"include_usage": True}}
DUMPED: Final[Body] = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": [CALL],
}
"""An answer's message as openai-python's `model_dump` writes it."""
INPUT_TEXT: Final[Body] = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "List the files."}],
}
FLAT_CALL: Final[Body] = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "list_files",
    "arguments": '{"path": "."}',
    "status": "completed",
    "namespace": None,
}
FLAT_RESULT: Final[Body] = {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"}
BLOCK: Final[Body] = {"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}}
MESSAGE_TOOL: Final[Body] = {"name": "list_files", "description": "Lists files.", "input_schema": CLOSED}
USE: Final[Body] = {"type": "tool_use", "id": "toolu_1", "name": "list_files", "input": {"path": "."}}
RESULT: Final[Body] = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt"}

OPENAI_CHATS: Final[dict[str, Body]] = {
    "openai-python": {"messages": [USER]},
    "openai-python, every plain field": {
        "messages": TURNS,
        "frequency_penalty": 0,
        "logit_bias": {},
        "logprobs": False,
        "max_completion_tokens": 3,
        "metadata": {"run": "7"},
        "modalities": ["text"],
        "n": 1,
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "prompt_cache_key": "run-7",
        "prompt_cache_retention": "24h",
        "reasoning_effort": "medium",
        "response_format": {"type": "text"},
        "safety_identifier": "user-7",
        "seed": 7,
        "service_tier": "auto",
        "stop": None,
        "store": True,
        "stream": False,
        "temperature": 1,
        "tool_choice": "auto",
        "tools": [TOOL],
        "top_logprobs": None,
        "top_p": 1,
        "user": "user-7",
        "verbosity": "low",
    },
    "openai-python, what a caller left out": {
        "messages": [{**USER, "name": None}],
        "tools": None,
        "response_format": None,
        "stop": "",
        "top_p": 0,
        "functions": None,
        "function_call": None,
        "audio": None,
        "web_search_options": None,
    },
    "openai-python, stream": {"messages": TURNS, **USAGE},
    "openai-python, obfuscated stream": {
        "messages": TURNS,
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": True},
    },
    "openai-python, parse": {"messages": TURNS, "response_format": JSON_SCHEMA},
    "openai-python, JSON mode": {"messages": TURNS, "response_format": {"type": "json_object"}},
    "openai-python, log-probabilities": {"messages": TURNS, "logprobs": True, "top_logprobs": 5},
    "openai-python, prediction": {"messages": TURNS, "prediction": {"type": "content", "content": "a.txt"}},
    "openai-python, developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "openai-python, parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]},
    "openai-python, forced tool": {
        "messages": TURNS,
        "tools": [STRICT_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "list_files"}},
    },
    "openai-python, model_dump": {"messages": [*TURNS, DUMPED, CALLED[-1]], "tools": [TOOL]},
    "openai-python, custom tool": {
        "messages": TURNS,
        "tools": [TOOL, {"type": "custom", "custom": {"name": "patch", "description": "Applies a patch."}}],
    },
    "openai-node, runTools": {"messages": TURNS, "tools": [STRICT_TOOL], "tool_choice": "auto", "stream": True},
    "openai-node, zodResponseFormat": {
        "messages": TURNS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": CLOSED, "strict": True}},
        **USAGE,
    },
}
AGENT_CHATS: Final[dict[str, Body]] = {
    "Cline": {
        "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "<task>List.</task>"}]}],
        "temperature": 0,
        **USAGE,
    },
    "Cline, reasoning model": {"messages": TURNS, "reasoning_effort": "high", "temperature": None, **USAGE},
    "Roo Code": {
        "messages": TURNS,
        "max_completion_tokens": 3,
        "tools": [STRICT_TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        **USAGE,
    },
    "Continue": {"messages": TURNS, "temperature": 0.5, "top_p": None, "stop": [], "stream": True},
    "Continue, agent": {
        "messages": [*CALLED[:2], {**CALLED[2], "content": ""}, CALLED[3]],
        "tools": [{**TOOL, "displayTitle": "List", "readonly": True, "group": "Built-In"}],
        "parallel_tool_calls": False,
        "stream": True,
    },
    "Aider": {"messages": [*TURNS, {"role": "assistant", "content": "Ok."}, USER], "temperature": 0, "stream": True},
    "Cursor": {"messages": TURNS, "tools": [FLAT_TOOL | TOOL], "tool_choice": "auto", "user": "u", **USAGE},
    "Zed": {"messages": TURNS, "stop": [], "temperature": 1.0, "prompt_cache_key": "thread-7", "stream": True},
    "VS Code Copilot": {
        "messages": [{**SYSTEM, "copilot_cache_control": {"type": "ephemeral"}}, USER],
        "n": 1,
        "temperature": 0.1,
        "top_p": 1,
        "intent": False,
        "thinking_budget": 0,
        "stream": True,
    },
    "OpenCode": {"messages": TURNS, "tools": [TOOL], "tool_choice": "auto", "reasoning_effort": "medium", **USAGE},
    "Goose": {"messages": CALLED, "tools": [TOOL], "temperature": 0.7, "stream": True},
    "OpenHands": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "x", "cache_control": {"type": "e"}}]},
            USER,
        ],
        "tools": [TOOL],
        "extra_headers": {},
    },
    "Codex, chat wire": {"messages": TURNS, "tools": [TOOL], "stream": True},
}
FRONT_END_CHATS: Final[dict[str, Body]] = {
    "Open WebUI": {"messages": TURNS, "temperature": 0.8, "stream": True},
    "Open WebUI, all of the front end": {
        "messages": [{"id": "m1", "parentId": None, "timestamp": 1790000000, "models": ["m"], **USER}],
        "stream": True,
        "params": {},
        "files": [],
        "tool_ids": [],
        "tool_servers": [],
        "features": {"image_generation": False, "web_search": False},
        "variables": {"{{USER_NAME}}": "Ann"},
        "model_item": {"id": "m", "info": {}},
        "session_id": "s7",
        "chat_id": "c7",
        "id": "i7",
        "background_tasks": {"title_generation": True},
    },
    "Open WebUI, Ollama's options": {
        "messages": TURNS,
        "num_ctx": 2048,
        "num_predict": 3,
        "repeat_penalty": 1.1,
        "mirostat": 0,
        "keep_alive": "5m",
        "options": {"num_ctx": 2048},
        "stream": False,
    },
    "Open WebUI, title": {
        "messages": [USER],
        "stream": False,
        "max_completion_tokens": 3,
        "metadata": {"task": "title"},
    },
    "LibreChat": {"messages": TURNS, "user": "65f1", **USAGE},
    "LibreChat, custom endpoint": {
        "messages": TURNS,
        "stream": True,
        "chatGptLabel": "m",
        "promptPrefix": None,
        "resendFiles": True,
        "endpoint": "headrace",
        "iconURL": None,
    },
    "LobeChat": {
        "messages": TURNS,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "enabledSearch": False,
        "apiMode": "chatCompletion",
        **USAGE,
    },
    "SillyTavern": {
        "messages": TURNS,
        "logprobs": 0 > 1,
        "min_p": 0,
        "top_k": 0,
        "repetition_penalty": 1,
        "top_a": 0,
        "typical_p": 1,
        "stop": [],
        "include_reasoning": True,
        "stream": True,
    },
    "Chatbox": {"messages": TURNS, "temperature": 0.7, "top_p": 1, "thinking": {"type": "disabled"}, "stream": True},
    "Home Assistant": {"messages": TURNS, "tools": [TOOL], "max_tokens": 3, "user": "c7", "store": False},
    "n8n": {"messages": TURNS, "temperature": 0.7, "timeout": 60000, "maxRetries": 2, "stream": True},
}
LIBRARY_CHATS: Final[dict[str, Body]] = {
    "LangChain": {"messages": [USER], "stream": False, "temperature": 0.7},
    "LangChain, bind_tools": {"messages": CALLED, "tools": [TOOL], "parallel_tool_calls": True, "stream": False},
    "LangChain, with_structured_output": {"messages": TURNS, "response_format": JSON_SCHEMA, "stream": False},
    "LangChain.js": {
        "messages": TURNS,
        "temperature": 1,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "n": 1,
        **USAGE,
    },
    "LangGraph, list contents": {
        "messages": [*CALLED[:3], {**CALLED[3], "content": [{"type": "text", "text": "a.txt"}], "name": "list_files"}],
        "tools": [TOOL],
    },
    "litellm, history of another provider": {
        "messages": [
            *TURNS,
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [{**CALL, "index": 0, "provider_specific_fields": None, "caller": None}],
                "function_call": None,
                "provider_specific_fields": {"citations": None},
                "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
                "reasoning_content": "hm",
                "images": [],
            },
            CALLED[-1],
        ],
        "tools": [TOOL],
    },
    "litellm, OpenRouter's history": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": "Hi.",
                "reasoning": "hm",
                "reasoning_details": [{"type": "reasoning.text"}],
            },
            USER,
        ],
        "usage": {"include": True},
        "provider": {"sort": "price"},
        "transforms": [],
    },
    "Gemini's OpenAI layer": {
        "messages": [
            *TURNS,
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "extra_content": {"google": {"thought_signature": "x"}}}],
                "extra_content": {},
            },
            CALLED[-1],
        ],
        "tools": [TOOL],
        "extra_body": {"google": {"thinking_config": {"include_thoughts": True}}},
    },
    "Vercel AI, openai": {
        "messages": TURNS,
        "tools": [STRICT_TOOL],
        "tool_choice": "auto",
        "max_completion_tokens": 3,
        **USAGE,
    },
    "Vercel AI, generateObject": {
        "messages": TURNS,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": CLOSED, "strict": True, "name": "response", "description": None},
        },
    },
    "Vercel AI, openai-compatible": {
        "messages": [*TURNS, {"role": "assistant", "content": "Hi.", "reasoning_content": "hm"}, USER],
        "reasoning_effort": "low",
        **USAGE,
    },
    "LlamaIndex": {"messages": TURNS, "temperature": 0.1, "stream": False},
    "LlamaIndex, agent": {
        "messages": CALLED,
        "tools": [{**TOOL, "function": {**FUNCTION, "strict": False}}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "temperature": 0.1,
        **USAGE,
    },
    "Semantic Kernel": {
        "messages": TURNS,
        "temperature": 1,
        "top_p": 1,
        "n": 1,
        "presence_penalty": 0,
        "logit_bias": {},
    },
    "DSPy": {"messages": TURNS, "temperature": 0.0, "max_tokens": 3},
    "Instructor": {
        "messages": TURNS,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "list_files"}},
        "max_tokens": 40,
    },
    "AutoGen": {"messages": [{**USER, "name": "ann"}], "cache_seed": 41, "stream": False},
    "CrewAI": {"messages": TURNS, "stop": ["\nObservation:"], "temperature": 0.7, "callbacks": []},
    "Haystack": {"messages": TURNS, "n": 1, "stream": False, "tools_strict": False},
}
COMPLETIONS: Final[dict[str, Body]] = {
    "openai-python": {"prompt": "Once upon a time"},
    "openai-python, every field": {
        "prompt": ["Once", "Twice"],
        "best_of": 1,
        "echo": True,
        "frequency_penalty": 0,
        "logit_bias": {},
        "logprobs": 2,
        "n": 1,
        "presence_penalty": 0,
        "seed": 7,
        "stop": ["\n"],
        "stream": False,
        "suffix": None,
        "temperature": 1,
        "top_p": 1,
        "user": "user-7",
    },
    "openai-python, nothing to say": {"prompt": "", "max_tokens": 0},
    "Continue, autocomplete": {
        "prompt": "<fim_prefix>def a():\n<fim_suffix>\n<fim_middle>",
        "temperature": 0.01,
        "stop": ["<fim_prefix>", "<fim_suffix>", "\n\n"],
        "raw": True,
        "stream": True,
    },
    "llm-vscode": {"prompt": "def a():", "temperature": 0.2, "top_p": 0.95, "max_new_token": None, "stop": [""]},
    "text-generation-webui": {
        "prompt": "Once",
        "early_stopping": False,
        "length_penalty": 1,
        "truncation_length": 2048,
    },
}
RESPONSES: Final[dict[str, Body]] = {
    "openai-python": {"input": "List the files."},
    "openai-python, every field": {
        "input": [{"role": "user", "content": "List the files."}],
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "instructions": "Be brief.",
        "max_tool_calls": 4,
        "metadata": {"run": "7"},
        "parallel_tool_calls": True,
        "prompt_cache_key": "run-7",
        "prompt_cache_retention": "24h",
        "reasoning": {"effort": "medium", "summary": "auto"},
        "safety_identifier": "user-7",
        "service_tier": "auto",
        "store": False,
        "stream": False,
        "temperature": 1,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "auto",
        "tools": [FLAT_TOOL],
        "top_logprobs": 0,
        "top_p": 1,
        "truncation": "auto",
        "user": "user-7",
        "background": None,
        "conversation": None,
        "previous_response_id": None,
        "prompt": None,
    },
    "openai-python, parse": {"input": "List the files.", "text": TEXT_FORMAT},
    "openai-python, model_dump": {
        "input": [
            INPUT_TEXT,
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": None,
                "encrypted_content": None,
                "status": None,
            },
            FLAT_CALL,
            {**FLAT_RESULT, "id": None, "status": None},
        ],
        "tools": [FLAT_TOOL],
    },
    "openai-node, stream": {
        "input": "List the files.",
        "stream": True,
        "stream_options": {"include_obfuscation": True},
    },
    "Codex": {
        "instructions": "You are a coding agent.",
        "input": [
            {**INPUT_TEXT, "role": "developer"},
            {**INPUT_TEXT, "content": [{"type": "input_text", "text": "<environment_context></environment_context>"}]},
            INPUT_TEXT,
        ],
        "tools": [
            FLAT_TOOL,
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "p",
                "format": {"type": "grammar", "syntax": "lark"},
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a7f2e-0000-7000-8000-000000000007",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "7"},
    },
    "Codex, second turn": {
        "instructions": "You are a coding agent.",
        "input": [INPUT_TEXT, {"type": "reasoning", "summary": [], "content": None}, FLAT_CALL, FLAT_RESULT],
        "tools": [FLAT_TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": [],
        "prompt_cache_key": "019a7f2e-0000-7000-8000-000000000007",
    },
    "OpenAI Agents": {
        "input": [{"role": "user", "content": "List the files."}],
        "instructions": "Be brief.",
        "tools": [{**FLAT_TOOL, "strict": True, "parameters": CLOSED}],
        "include": [],
        "parallel_tool_calls": None,
        "extra_query": None,
    },
    "Vercel AI, openai": {
        "input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": INPUT_TEXT["content"]}],
        "store": True,
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "json_schema", "strict": True, "name": "response", "schema": CLOSED}},
        "stream": True,
    },
    "LangChain, Responses": {"input": [{**INPUT_TEXT, "status": "completed"}], "stream": True, "store": False},
    "litellm, Responses": {"input": "List the files.", "user": None, "litellm_metadata": {"k": "v"}},
}
MESSAGES: Final[dict[str, Body]] = {
    "anthropic-python": {"messages": [USER]},
    "anthropic-python, every field": {
        "messages": [USER],
        "system": "Be brief.",
        "metadata": {"user_id": "user-7"},
        "service_tier": "auto",
        "stop_sequences": ["\n\nHuman:"],
        "stream": False,
        "temperature": 1,
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "tools": [MESSAGE_TOOL],
        "top_k": 40,
        "top_p": 0.9,
        "container": None,
        "inference_geo": None,
        "mcp_servers": [],
    },
    "anthropic-python, tool_runner": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look.", "citations": None},
                    {**USE, "caller": {"type": "direct"}, "toolset_name": None},
                ],
            },
            {"role": "user", "content": [{**RESULT, "is_error": None}]},
        ],
        "tools": [{**MESSAGE_TOOL, "cache_control": None, "defer_loading": False}],
        "thread": {"id": None},
    },
    "anthropic-python, thinking": {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 1024}},
    "anthropic-node, stream": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}],
        "stream": True,
    },
    "Claude Code": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder></system-reminder>"}, BLOCK]}
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cc_entrypoint=cli;"},
            {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "tools": [
            {**MESSAGE_TOOL, "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **CLOSED}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "temperature": 1,
        "stream": True,
    },
    "Claude Code, second turn": {
        "messages": [
            {"role": "user", "content": [BLOCK]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, USE]},
            {"role": "user", "content": [{**RESULT, "is_error": False, "cache_control": {"type": "ephemeral"}}]},
        ],
        "system": [{"type": "text", "text": "You are a coding agent."}],
        "tools": [{**MESSAGE_TOOL, "eager_input_streaming": True}],
        "stream": True,
    },
    "Claude Code, bare thinking": {"messages": [USER], "thinking": {"type": "enabled"}, "stream": True},
    "Claude Code, title": {
        "messages": [USER],
        "system": [{"type": "text", "text": "Write a title."}],
        "output_config": {"format": {"type": "json_schema", "schema": CLOSED}},
        "tools": [],
        "temperature": 0,
    },
    "Vercel AI, anthropic": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "List the files.", "cache_control": None}]}],
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [MESSAGE_TOOL],
        "tool_choice": {"type": "auto"},
        "stream": True,
    },
    "LangChain, anthropic": {"messages": [USER], "system": "Be brief.", "tools": [MESSAGE_TOOL], "betas": []},
}

BODIES: Final = [
    *(
        ("/v1/chat/completions", client, {"max_tokens": None if "max_completion_tokens" in body else 3, **body})
        for bodies in (OPENAI_CHATS, AGENT_CHATS, FRONT_END_CHATS, LIBRARY_CHATS)
        for client, body in bodies.items()
    ),
    *(("/v1/completions", client, {"max_tokens": 3, **body}) for client, body in COMPLETIONS.items()),
    *(("/v1/responses", client, {"max_output_tokens": 3, **body}) for client, body in RESPONSES.items()),
    *(("/v1/messages", client, {"max_tokens": 3, **body}) for client, body in MESSAGES.items()),
    ("/v1/messages/count_tokens", "Claude Code, count", {"messages": [USER], "system": [], "tools": [MESSAGE_TOOL]}),
]
"""Path, client and body without its model. Limits keep the answers short."""
