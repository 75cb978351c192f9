"""`POST /v1/messages`: check its body and make the request from it.

The body is translated into that of a chat, so prompts, forced calls and parsers are the same for both APIs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from headrace_broker import RegisteredModel
from headrace_gateway.anthropic.messages import read_conversation, text_of
from headrace_gateway.chat.fields import read_chat
from headrace_gateway.chat.tools import MAX_TOOLS, check_name
from headrace_gateway.requests import field_tables
from headrace_gateway.requests.call import Call, ChatOptions, MessageOptions
from headrace_gateway.requests.call_fields import boolean, checked, without_nulls
from headrace_gateway.requests.problems import Problems
from headrace_wire.sampling import MAX_STOP_CHARS, MAX_STOP_STRINGS
from headrace_wire.values import data_problem, named, shown

EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
DISPLAYS: Final = ("summarized", "omitted")
LEAST_BUDGET: Final = 1024
TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
TOOL_FIELDS: Final = ("name", "description", "input_schema", "strict", "type")
TOOL_HINTS: Final = ("cache_control", "eager_input_streaming", "input_examples", "allowed_callers", "defer_loading")
"""Accepted without effect."""
_IGNORED: Final = field_tables.MESSAGES_IGNORED.keys()


def read_message(body: Mapping[str, Any], *, model: RegisteredModel, lora: str | None) -> Call:
    """Check the body of `/v1/messages`. Raises ApiError that lists every problem."""
    given = without_nulls(body)
    problems = Problems()
    problems.unknown_names(given, field_tables.MESSAGES | _IGNORED, field_tables.MESSAGES_REFUSED)
    chat = _chat_of(given, model, problems)
    max_tokens = checked(given, "max_tokens", problems)
    if "max_tokens" not in given:
        problems.add("max_tokens", "max_tokens is required")
    chat.update({name: given[name] for name in ("top_p", "top_k") if name in given})
    _read_temperature(given, chat, problems)
    stops = _read_stops(given, chat, problems)
    stream = boolean(given, "stream", problems)
    _check_hints(given, problems)
    problems.raise_any()
    call = read_chat({**chat, "max_tokens": max_tokens}, model=model, lora=lora)
    options = call.options
    assert isinstance(options, ChatOptions) and max_tokens is not None
    message = MessageOptions(
        max_tokens=max_tokens,
        stop_sequences=stops,
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
        tools=options.tools,
        parallel_tool_calls=options.parallel_tool_calls,
        shows_thinking=_shows_thinking(given),
    )
    return Call(call.model, call.requests, message, stream, ignored=problems.ignored)


def read_counted(body: Mapping[str, Any], *, model: RegisteredModel, lora: str | None) -> Call:
    """Check the body of `/v1/messages/count_tokens`: the fields of a message that affect its prompt."""
    given = without_nulls(body)
    problems = Problems()
    problems.unknown_names(given, field_tables.COUNTED_MESSAGES | _IGNORED, field_tables.MESSAGES_REFUSED)
    chat = _chat_of(given, model, problems)
    _check_hints(given, problems)
    problems.raise_any()
    return replace(read_chat(chat, model=model, lora=lora), ignored=problems.ignored)


def _chat_of(given: Mapping[str, Any], model: RegisteredModel, problems: Problems) -> dict[str, Any]:
    """Return the fields of a chat that determine its prompt."""
    chat: dict[str, Any] = {"model": given.get("model")}
    messages = read_conversation(given.get("messages"), problems)
    if "system" in given:
        system = text_of(given["system"], "system", problems)
        messages = [{"role": "system", "content": system}, *messages] if system else messages
    chat["messages"] = messages
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        chat |= {"add_generation_prompt": False, "continue_final_message": True}  # the answer continues this message
    tools = _read_tools(given, problems)
    if tools:
        chat["tools"] = tools
    _read_tool_choice(given, chat, tools, problems)
    variables = _read_thinking(given, model, problems)
    _read_output_config(given, model, chat, variables, problems)
    if variables:
        chat["chat_template_kwargs"] = variables
    return chat


def _read_tools(given: Mapping[str, Any], problems: Problems) -> list[dict[str, Any]]:
    tools = given.get("tools", [])
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        told = f"{len(tools)}" if isinstance(tools, list) else shown(tools)
        problems.must("tools", f"be a list of at most {MAX_TOOLS} tools", told)
        return []
    return [read for position, tool in enumerate(tools) if (read := _read_tool(f"tools[{position}]", tool, problems))]


def _read_tool(path: str, tool: Any, problems: Problems) -> dict[str, Any] | None:
    if not isinstance(tool, Mapping):
        problems.must(path, "be a map", shown(tool))
        return None
    kind = tool.get("type")
    if kind not in (None, "custom"):
        message = f"{path}.type must be custom or absent, got {named(kind)}: the service runs no server tools"
        if isinstance(kind, str):
            problems.ignore(f"tools[{kind[:64]}]", message)
        else:
            problems.add(f"{path}.type", message)
        return None
    problems.unknown_fields(path, tool, (*TOOL_FIELDS, *TOOL_HINTS))
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        problems.must(f"{path}.input_schema", "be a JSON Schema object", shown(schema))
    elif (problem := data_problem(f"{path}.input_schema", schema)) is not None:
        problems.add(f"{path}.input_schema", problem)
    name = tool.get("name")
    check_name(path, name, problems)
    function = {"name": name, "parameters": schema}
    for field, kinds, told in (("description", str, "a string"), ("strict", bool, "true or false")):
        if isinstance(tool.get(field), kinds):
            function[field] = tool[field]
        elif field in tool:
            problems.must(f"{path}.{field}", f"be {told}", shown(tool[field]))
    return {"type": "function", "function": function}


def _read_tool_choice(
    given: Mapping[str, Any], chat: dict[str, Any], tools: list[dict[str, Any]], problems: Problems
) -> None:
    choice = given.get("tool_choice")
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind not in (*TOOL_CHOICES, "tool"):
        problems.must("tool_choice.type", "be auto, any, tool or none", named(kind))
        return
    problems.unknown_fields("tool_choice", choice, ("type", "name", "disable_parallel_tool_use"))
    if kind == "tool":
        name = choice.get("name")
        if not any(tool["function"]["name"] == name for tool in tools):
            problems.must("tool_choice.name", "be the name of one of the tools", named(name))
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        if kind == "any" and not tools:
            problems.add("tool_choice", "tool_choice any needs tools")
        chat["tool_choice"] = TOOL_CHOICES[kind]
    alone = boolean(choice, "disable_parallel_tool_use", problems, path="tool_choice.")
    if alone:
        chat["parallel_tool_calls"] = False


def _read_thinking(given: Mapping[str, Any], model: RegisteredModel, problems: Problems) -> dict[str, Any]:
    """Return the variables of the chat template that switch reasoning on or off. Without `thinking` it is off."""
    thinking = given.get("thinking", {"type": "disabled"})
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        problems.must("thinking.type", "be enabled, disabled or adaptive", named(kind))
        return {}
    problems.unknown_fields("thinking", thinking, ("type", "budget_tokens", "display"))
    if kind == "enabled":
        budget = thinking.get("budget_tokens", LEAST_BUDGET)  # Claude Code sends none to models that it does not know
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < LEAST_BUDGET:
            told = f"thinking.budget_tokens must be an integer of at least {LEAST_BUDGET}, got {shown(budget)}"
            problems.add("thinking.budget_tokens", told)
        if model.template.thinking is None and model.reasoning_parser is None:
            problems.ignore("thinking", "thinking.type must not be enabled: this model does not reason")
    display = thinking.get("display")
    if display not in (None, *DISPLAYS):
        problems.must("thinking.display", f"be one of {', '.join(DISPLAYS)}", named(display))
    return {} if model.template.thinking is None else {model.template.thinking: kind != "disabled"}


def _shows_thinking(given: Mapping[str, Any]) -> bool:
    thinking = given.get("thinking", {})
    return thinking.get("type") in ("enabled", "adaptive") and thinking.get("display") != "omitted"


def _read_output_config(
    given: Mapping[str, Any],
    model: RegisteredModel,
    chat: dict[str, Any],
    variables: dict[str, Any],
    problems: Problems,
) -> None:
    config = given.get("output_config", {})
    if not isinstance(config, Mapping):
        problems.must("output_config", "be a map", shown(config))
        return
    problems.unknown_fields("output_config", config, ("effort", "format"))
    effort, wanted = config.get("effort"), config.get("format")
    if effort is not None and effort not in EFFORTS:
        problems.must("output_config.effort", f"be one of {', '.join(EFFORTS)}", named(effort))
    elif effort is not None and model.template.reasoning_effort:
        variables["reasoning_effort"] = effort
    elif effort is not None:
        problems.ignore(
            "output_config.effort",
            f"output_config.effort must be absent, got {effort}: the chat template of this model does not read it",
        )
    if wanted is None:
        return
    if (
        not isinstance(wanted, Mapping)
        or wanted.get("type") != "json_schema"
        or not isinstance(wanted.get("schema"), Mapping)
    ):
        problems.must("output_config.format", "be a map with type json_schema and a schema", shown(wanted))
        return
    problems.unknown_fields("output_config.format", wanted, ("type", "schema"))
    if "tools" in chat and chat.get("tool_choice") != "none":
        problems.add("output_config.format", "output_config.format excludes tools: its grammar permits no call")
    chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted["schema"]}}


def _read_temperature(given: Mapping[str, Any], chat: dict[str, Any], problems: Problems) -> None:
    temperature = given.get("temperature")
    if temperature is None:
        return
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature <= 1:
        problems.must("temperature", "be a number from 0 to 1", shown(temperature))
    chat["temperature"] = temperature


def _read_stops(given: Mapping[str, Any], chat: dict[str, Any], problems: Problems) -> tuple[str, ...]:
    stops = given.get("stop_sequences", [])
    fine = isinstance(stops, list) and len(stops) <= MAX_STOP_STRINGS
    if not fine or not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        limits = f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters"
        problems.must("stop_sequences", f"be a list of {limits}", shown(stops))
        return ()
    if stops:
        chat["stop"] = stops
    return tuple(stops)


def _check_hints(given: Mapping[str, Any], problems: Problems) -> None:
    """Record the values that ask for another result than the service gives. The other values change no result."""
    if given.get("speed", "standard") != "standard":
        problems.ignore("speed", "speed must be standard or absent")
    edits = given.get("context_management", {})
    listed = edits.get("edits", []) if isinstance(edits, Mapping) else None
    if not isinstance(listed, list) or not all(map(_clears_thinking, listed)):
        message = "context_management may hold only edits of type clear_thinking: the service edits no conversations"
        problems.ignore("context_management", message)


def _clears_thinking(edit: Any) -> bool:
    kind = edit.get("type") if isinstance(edit, Mapping) else None
    return isinstance(kind, str) and kind.startswith("clear_thinking_")
