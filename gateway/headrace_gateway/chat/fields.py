"""`POST /v1/chat/completions`: check its body and make the request from it."""

from collections.abc import Mapping
from typing import Any, Final

from headrace_broker import GenerateRequest, RegisteredModel
from headrace_gateway.chat.forced_choice import forced_choice, strict_calls
from headrace_gateway.chat.messages import read_messages
from headrace_gateway.chat.tools import Tools, read_tools
from headrace_gateway.errors import ForcedChoiceError
from headrace_gateway.parsers.registry import HARMONY, REASONING_PARSERS, TOOL_PARSERS
from headrace_gateway.requests import call_fields, field_tables
from headrace_gateway.requests.call import Call, ChatOptions
from headrace_gateway.requests.call_fields import boolean, checked
from headrace_gateway.requests.field_rules import RULES
from headrace_gateway.requests.problems import Problems
from headrace_wire.codes import ErrorCode

_TEMPLATE_FIELDS: Final = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")


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
    request = {
        "messages": read_messages(given.get("messages"), problems, knows_developer=knows_developer),
        "sampling_params": sampling,
        "lora": lora,
    }
    prefix_key = checked(given, "prompt_cache_key", problems) or None
    add_template_options(request, given, tools, variables, model, problems)
    options = ChatOptions(
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
    requests = (_checked_request(request, given, problems),)
    return Call(given["model"], requests, options, stream, priority, prefix_key, ignored=problems.ignored)


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

    A parser name that this gateway does not know counts as none.
    """
    tool_parser = reasoning_parser = None
    if model is not None and tools.choice == "auto" and model.tool_parser in TOOL_PARSERS:
        tool_parser = model.tool_parser
    # A caller's grammar does not permit the message headers of gpt-oss, so that parser is left out. Other models follow
    # the grammar after the reasoning that the prompt has opened.
    is_all_grammar = "structured_outputs" in sampling and not tools.shown
    if model is not None and model.reasoning_parser in REASONING_PARSERS - ({HARMONY} if is_all_grammar else set()):
        reasoning_parser = model.reasoning_parser
    forced = _bind_calls(tools, model, variables, sampling, problems, parallel=parallel)
    if model is not None and (
        (tools.choice == "auto" and model.template.special_tags)
        or (reasoning_parser is not None and model.template.special_think_tags)
    ):
        sampling.setdefault("skip_special_tokens", False)
        if sampling["skip_special_tokens"] and model.template.special_think_tags:
            reasoning_parser = None  # the text lacks the tag that ends the reasoning: all of it would be reasoning
    return forced or tool_parser, reasoning_parser


def _read_max_tokens(given: Mapping[str, Any], problems: Problems) -> int | None:
    old: int | None = checked(given, "max_tokens", problems)
    new: int | None = checked(given, "max_completion_tokens", problems)
    if old is not None and new is not None and old != new:
        problems.add("max_tokens", f"max_tokens ({old}) and max_completion_tokens ({new}) differ: give one of them")
    return old if new is None else new


def _read_logprobs(given: Mapping[str, Any], problems: Problems) -> int | None:
    wanted = boolean(given, "logprobs", problems)
    top = checked(given, "top_logprobs", problems)
    if top and not wanted:
        problems.add("top_logprobs", "top_logprobs requires logprobs: true")
    return (top or 0) if wanted else None


def _check_refused(given: Mapping[str, Any], tools: Tools, sampling: Mapping[str, Any], problems: Problems) -> None:
    if boolean(given, "store", problems):
        problems.ignore("store", "store must be false or absent, got true: chat completions are not stored")
    if given.get("modalities", ["text"]) != ["text"]:
        problems.unsupported("modalities", 'modalities must be ["text"]: no other output is supported')
    check_verbosity("verbosity", given, "messages", problems)
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
    """Return whether the request switches reasoning off. The template then ends the reasoning in the prompt."""
    switch = model.template.thinking if model is not None else None
    return switch is not None and variables.get(switch) is False


def add_template_options(
    request: dict[str, Any],
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
        problems.add("tools", message, ErrorCode.UNSUPPORTED)
    if variables:
        request["chat_template_kwargs"] = variables
    for name in _TEMPLATE_FIELDS[1:]:
        if name in given:
            request[name] = boolean(given, name, problems)


def template_variables(given: Mapping[str, Any], model: RegisteredModel | None, problems: Problems) -> dict[str, Any]:
    """Return the chat template's variables. The caller's `chat_template_kwargs` override `reasoning_effort`."""
    variables = checked(given, "chat_template_kwargs", problems) or {}
    effort = effort_variables(given.get("reasoning_effort"), model, problems)
    return {**effort, **variables}


def effort_variables(
    effort: Any, model: RegisteredModel | None, problems: Problems, *, name: str = "reasoning_effort"
) -> dict[str, Any]:
    """Return the chat template's variables for the effort in the field `name`."""
    if effort is None:
        return {}
    if problem := RULES["reasoning_effort"].problem(name, effort):
        problems.add(name, problem)
        return {}
    variables: dict[str, Any] = {}
    if model is not None and model.template.reasoning_effort:
        variables["reasoning_effort"] = effort
    if model is not None and model.template.thinking:
        variables[model.template.thinking] = effort != "none"
    if not variables and effort != "none":
        problems.ignore(
            name, f"{name} must be none or absent, got {effort}: the chat template of this model does not read it"
        )
    return variables


def check_verbosity(name: str, given: Mapping[str, Any], place: str, problems: Problems) -> None:
    """Check the field `verbosity` at the path `name`. No chat template reads it.

    Args:
        place: where callers can ask for it instead.
    """
    verbosity = given.get("verbosity", "medium")
    if problem := RULES["verbosity"].problem(name, verbosity):
        problems.add(name, problem)
    elif verbosity != "medium":
        problems.ignore(name, f"{name} must be medium or absent, got {verbosity}: ask in the {place}")


def read_metadata(given: Mapping[str, Any], problems: Problems) -> dict[str, str] | None:
    """Return the caller's key-value pairs, which the answer repeats."""
    metadata = checked(given, "metadata", problems)
    return None if metadata is None else dict(metadata)


def _checked_request(request: Mapping[str, Any], given: Mapping[str, Any], problems: Problems) -> GenerateRequest:
    names = {name: name for name in ("tools", *_TEMPLATE_FIELDS)}
    names["max_tokens"] = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    if "structured_outputs" not in given:
        names["structured_outputs"] = "response_format" if "response_format" in given else "tools"
    return call_fields.checked_request(request, names, problems)
