"""`POST /v1/chat/completions`: check its body and make the request from it."""

from collections.abc import Mapping
from typing import Any, Final

from headrace_broker import RegisteredModel, SubmitRequest
from headrace_gateway import call_fields, field_tables
from headrace_gateway.call import Call, ChatForm
from headrace_gateway.call_fields import MAX_LOGPROBS, MAX_TOKENS, boolean, integer
from headrace_gateway.errors import ForcedChoiceError
from headrace_gateway.forced_choice import forced_choice, strict_calls
from headrace_gateway.message_fields import read_messages
from headrace_gateway.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from headrace_gateway.problems import Problems, shown
from headrace_gateway.tool_fields import Tools, read_tools

REASONING_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_RESERVED_KWARGS: Final = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
)
_TEMPLATE_FIELDS: Final = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_SPECIAL_REASONING: Final = ("mistral", "openai")
"""Reasoning parsers whose tags are special tokens."""
MAX_METADATA: Final = 16
MAX_METADATA_NAME: Final = 64
MAX_METADATA_VALUE: Final = 512


def read_chat(body: Mapping[str, Any], *, model: RegisteredModel | None, lora: str | None) -> Call:
    """Check the body. Raises ApiError that lists every problem.

    Args:
        model: the registered model; None if the registry has no entry for it.
        lora: the adapter that the body's `model` names.
    """
    given = call_fields.without_nulls(body)
    problems = Problems()
    call_fields.check_names(given, field_tables.CHAT, problems)
    sampling = call_fields.sampling_of(given)
    stream, usage, continuous = call_fields.read_stream(given, problems)
    priority, tier = call_fields.read_priority(given, problems)
    call_fields.read_response_format(given, sampling, problems)
    sampling["max_tokens"] = _read_max_tokens(given, problems) or call_fields.rest_of_context(model)
    logprobs = _read_logprobs(given, problems)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    tools = read_tools(given, problems)
    _check_refused(given, tools, sampling, problems)
    parallel = boolean(given, "parallel_tool_calls", problems, default=True)
    variables = template_variables(given, model, problems)
    tool_parser, reasoning_parser = bind_parsers(tools, model, variables, sampling, problems, parallel=parallel)
    knows_developer = model is not None and model.template.developer
    request: SubmitRequest = {
        "messages": read_messages(given.get("messages"), problems, knows_developer=knows_developer),
        "sampling_params": sampling,
    }
    request.update(call_fields.read_cache_key(given, problems))
    add_template_options(request, given, tools, variables, model, problems)
    form = ChatForm(
        n=given.get("n", 1),
        include_usage=usage,
        continuous_usage=continuous,
        logprobs=logprobs,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        tools=tools.allowed,
        tool_choice=tools.choice,
        parallel_tool_calls=parallel,
        include_reasoning=boolean(given, "include_reasoning", problems, default=True),
        return_token_ids=boolean(given, "return_token_ids", problems),
        tokens_as_ids=boolean(given, "return_tokens_as_token_ids", problems),
        prompt_logprobs="prompt_logprobs" in sampling,
        metadata=read_metadata(given, problems),
        service_tier=tier,
    )
    _check(request, given, problems)
    problems.raise_any()
    if lora:
        request["lora"] = lora
    return Call(given["model"], (request,), form, stream, priority)


def bind_parsers(
    tools: Tools,
    model: RegisteredModel | None,
    variables: Mapping[str, Any],
    sampling: dict[str, Any],
    problems: Problems,
    *,
    parallel: bool,
) -> tuple[str | None, str | None]:
    """Return the tool parser and the reasoning parser of the answer, and set the sampling that they need.

    A name that only newer gateways know counts as none.
    """
    tool_parser = reasoning_parser = None
    if model is not None and tools.choice == "auto" and model.tool_parser in TOOL_PARSERS:
        tool_parser = model.tool_parser
    # a grammar of the caller covers the output from its first character, so there is no reasoning
    is_all_grammar = "structured_outputs" in sampling and not tools.shown
    if model is not None and not is_all_grammar and model.reasoning_parser in REASONING_PARSERS:
        reasoning_parser = model.reasoning_parser
    forced = _bind_calls(tools, model, variables, sampling, problems, parallel=parallel)
    if _reads_special_tokens(model, tools, reasoning_parser):
        sampling.setdefault("skip_special_tokens", False)
    return forced or tool_parser, reasoning_parser


def _read_max_tokens(given: Mapping[str, Any], problems: Problems) -> int | None:
    old = integer(given, "max_tokens", 1, MAX_TOKENS, problems)
    new = integer(given, "max_completion_tokens", 1, MAX_TOKENS, problems)
    if old is not None and new is not None and old != new:
        problems.add("max_tokens", f"max_tokens ({old}) and max_completion_tokens ({new}) differ: give one of them")
    return old if new is None else new


def _read_logprobs(given: Mapping[str, Any], problems: Problems) -> int | None:
    wanted = boolean(given, "logprobs", problems)
    top = integer(given, "top_logprobs", 0, MAX_LOGPROBS, problems)
    if top is not None and not wanted:
        problems.add("top_logprobs", "top_logprobs requires logprobs: true")
    return (top or 0) if wanted else None


def _check_refused(given: Mapping[str, Any], tools: Tools, sampling: Mapping[str, Any], problems: Problems) -> None:
    if boolean(given, "store", problems):
        problems.unsupported("store", "store must be false or absent: chat completions are not stored")
    if given.get("modalities", ["text"]) != ["text"]:
        problems.unsupported("modalities", 'modalities must be ["text"]: only text is supported')
    if given.get("verbosity", "medium") != "medium":
        problems.unsupported("verbosity", "verbosity must be medium or absent: ask in the messages")
    if "response_format" in given and "structured_outputs" in sampling and tools.shown:
        problems.add("response_format", "response_format excludes tools: its grammar permits no call")


def _bind_calls(
    tools: Tools,
    model: RegisteredModel | None,
    variables: Mapping[str, Any],
    sampling: dict[str, Any],
    problems: Problems,
    *,
    parallel: bool,
) -> str | None:
    """Set the grammar that calls must follow; return the parser of a forced choice."""
    must_call = tools.choice in ("required", "named")
    if "structured_outputs" in sampling:
        if must_call:
            problems.add("tool_choice", "a tool_choice that forces a call cannot be combined with structured_outputs")
        return None
    tool_parser = model.tool_parser if model is not None else None
    try:
        if must_call:
            forced = forced_choice(
                tools.allowed,
                tool_parser=tool_parser,
                reasoning_parser=model.reasoning_parser if model is not None else None,
                prompt_tail="</think>" if _reasons_not(model, variables) else None,
                parallel=parallel and tools.choice == "required",
            )
            sampling["structured_outputs"] = {"grammar": forced.grammar}
            return forced.syntax
        if tools.choice == "auto" and model is not None and not model.template.special_tags:
            grammar = strict_calls(tools.allowed, tool_parser=tool_parser, parallel=parallel)
            if grammar is not None:
                sampling["structured_outputs"] = {"grammar": grammar}
    except ForcedChoiceError as error:
        problems.add("tools", str(error))
    return None


def _reasons_not(model: RegisteredModel | None, variables: Mapping[str, Any]) -> bool:
    """Return whether the request switches reasoning off: the template then closes it in the prompt."""
    switch = model.template.thinking if model is not None else None
    return switch is not None and variables.get(switch) is False


def _reads_special_tokens(model: RegisteredModel | None, tools: Tools, reasoning_parser: str | None) -> bool:
    """Return whether the parsers need tags that are special tokens, which the text omits by default."""
    calls = tools.choice == "auto" and model is not None and model.template.special_tags
    return calls or reasoning_parser in _SPECIAL_REASONING


def add_template_options(
    request: SubmitRequest,
    given: Mapping[str, Any],
    tools: Tools,
    variables: dict[str, Any],
    model: RegisteredModel | None,
    problems: Problems,
) -> None:
    """Add the chat template's inputs other than the messages."""
    template = model.template if model is not None else None
    if tools.shown and (template is None or template.tools):
        request["tools"] = tools.shown
    elif tools.shown and tools.choice == "auto":
        message = "the chat template of this model does not support tools: use tool_choice required, or name a function"
        problems.add("tools", message, "unsupported")
    if variables:
        request["chat_template_kwargs"] = variables
    for name in _TEMPLATE_FIELDS[1:]:
        if name in given:
            request[name] = boolean(given, name, problems)


def template_variables(given: Mapping[str, Any], model: RegisteredModel | None, problems: Problems) -> dict[str, Any]:
    """Return the chat template's variables. The caller's own ones override reasoning_effort."""
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        problems.add("chat_template_kwargs", f"chat_template_kwargs must be an object, not {shown(variables)}")
        variables = {}
    for name in variables:
        if name in _RESERVED_KWARGS:
            problems.add(f"chat_template_kwargs.{name}", f"chat_template_kwargs must not set {name}: it is a field")
    effort = effort_variables(given.get("reasoning_effort"), model, problems)
    return {**effort, **variables}


def effort_variables(
    effort: Any, model: RegisteredModel | None, problems: Problems, *, name: str = "reasoning_effort"
) -> dict[str, Any]:
    """Return the chat template's variables for the effort in the field `name`."""
    if effort is None:
        return {}
    if effort not in REASONING_EFFORTS:
        problems.add(name, f"{name} must be one of {', '.join(REASONING_EFFORTS)}, not {shown(effort)}")
        return {}
    variables: dict[str, Any] = {}
    if model is not None and model.template.reasoning_effort:
        variables["reasoning_effort"] = effort
    if model is not None and model.template.thinking:
        variables[model.template.thinking] = effort != "none"
    if not variables and effort != "none":
        problems.unsupported(name, f"{name} must be none or absent: the chat template of this model does not read it")
    return variables


def read_metadata(given: Mapping[str, Any], problems: Problems) -> dict[str, str] | None:
    """Return the caller's key-value pairs, which the answer repeats."""
    metadata = given.get("metadata")
    if metadata is None:
        return None
    if isinstance(metadata, Mapping) and len(metadata) <= MAX_METADATA and all(map(_is_pair, metadata.items())):
        return dict(metadata)
    limits = f"{MAX_METADATA_VALUE} characters with keys of at most {MAX_METADATA_NAME}"
    message = f"metadata must hold at most {MAX_METADATA} strings of {limits}"
    problems.add("metadata", message)
    return None


def _is_pair(pair: tuple[str, Any]) -> bool:
    name, value = pair
    return isinstance(value, str) and len(value) <= MAX_METADATA_VALUE and len(name) <= MAX_METADATA_NAME


def _check(request: SubmitRequest, given: Mapping[str, Any], problems: Problems) -> None:
    names = {name: name for name in ("tools", *_TEMPLATE_FIELDS)}
    names["max_tokens"] = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    if "structured_outputs" not in given:
        names["structured_outputs"] = "response_format" if "response_format" in given else "tools"
    call_fields.check_request(request, names, problems)
