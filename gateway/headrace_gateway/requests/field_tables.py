"""Which fields of a body are supported, which are accepted without effect, and which are refused with which reason.

A field that is in none of these tables is ignored and named in a header of the answer. A misspelt field is refused.
"""

from typing import Final

from headrace_wire import sampling

_READ_OTHERWISE: Final = ("max_tokens", "logprobs", "logprob_token_ids", "detokenize", "extra_args")
"""Sampling parameters that have another name or another meaning in the API, or none."""
SAMPLING: Final = {
    **{name: name for name in sampling.SAMPLING if name not in _READ_OTHERWISE},
    "vllm_xargs": "extra_args",
}
"""Sampling parameters: the API's name -> the queue's name. The queue's rules check the values."""

COMMON: Final = frozenset({
    "model", "stream", "stream_options", "priority", "service_tier", "response_format",
    "logprobs", "max_tokens", "prompt_cache_key", "return_token_ids", "return_tokens_as_token_ids",
})  # fmt: skip
CHAT: Final = COMMON | frozenset({
    "messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "top_logprobs",
    "reasoning_effort", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "metadata", "include_reasoning", "store", "verbosity", "modalities",
})  # fmt: skip
COMPLETION: Final = COMMON | frozenset({"prompt", "echo", "suffix", "best_of"})
RESPONSE: Final = frozenset({
    "model", "input", "instructions", "max_output_tokens", "tools", "tool_choice", "parallel_tool_calls",
    "text", "reasoning", "top_logprobs", "include", "previous_response_id", "store", "background", "metadata",
    "stream", "stream_options", "truncation", "priority", "service_tier", "prompt_cache_key",
    "chat_template_kwargs", "return_tokens_as_token_ids", "max_tool_calls", "context_management", "background_options",
})  # fmt: skip
"""Fields of the Responses API. It also has the sampling parameters, except for those in RESPONSE_REFUSED."""
TOKENIZE_PROMPT: Final = frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"})
TOKENIZE_CHAT: Final = TOKENIZE_PROMPT - {"prompt"} | frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
)
DETOKENIZE: Final = frozenset({"model", "tokens"})
COUNTED_MESSAGES: Final = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "context_management", "speed"}
)
MESSAGES: Final = COUNTED_MESSAGES | frozenset(
    {"max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p"}
)
MESSAGES_IGNORED: Final = {
    "cache_control": "the prefix cache needs no breakpoints",
    "diagnostics": "the prefix cache reports no diagnostics",
    "metadata": "the tenant comes from the API key",
    "service_tier": "there is only one tier; the header X-Headrace-Priority chooses the priority",
}
MESSAGES_REFUSED: Final = {
    "container": "the service runs no server tools",
    "inference_geo": "the operator decides where workers run",
    "mcp_servers": "the service runs no server tools",
    "output_format": "use output_config.format",
    "user_profile_id": "the tenant comes from the API key",
    "workspace_id": "the tenant comes from the API key",
}

IGNORED: Final = {
    "user": "the tenant comes from the API key",
    "safety_identifier": "the service does no moderation",
    "prediction": "it does not change the output",
    "prompt_cache_retention": "cached blocks stay until their memory is needed",
    "prompt_cache_options": "cached blocks stay until their memory is needed",
}
"""Accepted without effect: field -> why that is harmless."""

_USE_TOOLS: Final = "use tools and tool_choice"
_USE_STRUCTURED: Final = "use structured_outputs or response_format"
REFUSED: Final = {
    "functions": _USE_TOOLS,
    "function_call": _USE_TOOLS,
    "guided_json": _USE_STRUCTURED,
    "guided_regex": _USE_STRUCTURED,
    "guided_choice": _USE_STRUCTURED,
    "guided_grammar": _USE_STRUCTURED,
    "guided_decoding_backend": _USE_STRUCTURED,
    "guided_whitespace_pattern": _USE_STRUCTURED,
    "chat_template": "the worker uses the model's own template",
    "documents": "put their text into the messages",
    "audio": "only text is supported",
    "moderation": "the service does no moderation",
    "web_search_options": "the service does not search: offer a tool",
    "cache_salt": "the prefix cache is already separate for each tenant, and for each key without one",
    "truncate_prompt_tokens": "shorten the prompt before it is sent",
    "thinking_token_budget": "use max_tokens",
    "use_beam_search": "beam search is not supported",
    "kv_transfer_params": "the KV cache stays in its worker",
    "logits_processors": "the service runs no code of callers",
    "prompt_embeds": "prompts are text or token ids",
    "max_new_tokens": "use max_tokens",
    "best_of_n": "use n",
    "max_output_tokens": "use max_tokens",
    "extra_args": "use vllm_xargs",
    "logprob_token_ids": "use top_logprobs",
}
"""Known from OpenAI or vLLM, but not supported: field -> what to do instead."""

_USE_INPUT: Final = "use input"
_USE_MAX_OUTPUT: Final = "use max_output_tokens"
_USE_TEXT: Final = "use text.format"
RESPONSE_REFUSED: Final = {
    **{name: why for name, why in REFUSED.items() if name not in RESPONSE},
    "guided_json": _USE_TEXT,
    "max_new_tokens": _USE_MAX_OUTPUT,
    "thinking_token_budget": _USE_MAX_OUTPUT,
    "messages": _USE_INPUT,
    "max_tokens": _USE_MAX_OUTPUT,
    "max_completion_tokens": _USE_MAX_OUTPUT,
    "response_format": _USE_TEXT,
    "verbosity": "use text.verbosity",
    "reasoning_effort": "use reasoning.effort",
    "logprobs": "use top_logprobs, and include message.output_text.logprobs",
    "n": "a response has one output",
    "prompt_logprobs": "a response object has no field for them",
    "return_token_ids": "a response object has no field for them",
    "conversation": "use previous_response_id",
    "prompt": "the service stores no prompts: put the text into instructions",
    "access_programs": "the service does no moderation",
    "image": "only text is supported",
}
"""REFUSED for the Responses API."""
