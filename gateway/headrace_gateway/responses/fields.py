"""`POST /v1/responses`: check its body and make the request from it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace_broker import GenerateRequest, RegisteredModel
from headrace_gateway.chat import fields as chat_fields
from headrace_gateway.chat.tools import Tools, is_function, read_tools
from headrace_gateway.requests import call_fields, field_tables
from headrace_gateway.requests.call import Call, ResponseOptions
from headrace_gateway.requests.call_fields import boolean, checked
from headrace_gateway.requests.field_rules import LOWEST_PRIORITY
from headrace_gateway.requests.problems import Problems
from headrace_gateway.responses.background_options import read_window
from headrace_gateway.responses.input_items import Item, messages_of, read_items
from headrace_wire.values import data_problem, named, shown

INCLUDABLE: Final = ("message.output_text.logprobs", "reasoning.encrypted_content")
NEVER_INCLUDED: Final = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Parts of items that no response here has."""
TRUNCATIONS: Final = ("auto", "disabled")
SUMMARIES: Final = ("auto", "concise", "detailed")
_TEXT_FORMATS: Final = ("text", "json_object", "json_schema")


def read_response(
    body: Mapping[str, Any], *, model: RegisteredModel | None, lora: str | None, history: Sequence[Item] = ()
) -> Call:
    """Check the body. Raises ApiError that lists every problem.

    Args:
        model: the registered model; None if the registry has no entry for it.
        lora: the adapter that the body's `model` names.
        history: the items of the responses that this one continues.
    """
    given = call_fields.without_nulls(body)
    problems = Problems()
    call_fields.check_names(given, field_tables.RESPONSE, problems, field_tables.RESPONSE_REFUSED)
    sampling = call_fields.sampling_of(given)
    stream = _read_stream(given, problems)
    priority, tier = call_fields.read_priority(given, problems)
    text = _read_text(given, sampling, problems)
    reasoning = _read_reasoning(given, problems)
    sampling["max_tokens"] = checked(given, "max_output_tokens", problems) or (call_fields.rest_of_context(model))
    checked(given, "max_tool_calls", problems)  # limits server tools, which the service does not have
    if given.get("context_management"):
        problems.ignore("context_management", "context_management must be absent: the service edits no contexts")
    logprobs = _read_logprobs(given, problems)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    tools = _read_tools(given, sampling, problems)
    parallel = boolean(given, "parallel_tool_calls", problems, default=True)
    effort = chat_fields.effort_variables(reasoning["effort"], model, problems, name="reasoning.effort")
    variables = {**effort, **chat_fields.template_variables(given, model, problems)}
    tool_parser, reasoning_parser = chat_fields.bind_parsers(
        tools, model, variables, sampling, problems, parallel=parallel
    )
    items = read_items(given.get("input"), problems)
    messages = _messages(given, [*history, *items], model, problems)
    request = {"messages": messages, "sampling_params": sampling, "lora": lora}
    prefix_key = checked(given, "prompt_cache_key", problems) or None
    chat_fields.add_template_options(request, {}, tools, variables, model, problems)
    store = boolean(given, "store", problems, default=True)
    background = boolean(given, "background", problems)
    window = read_window(given, problems, background=background, stream=stream)
    if window is not None and priority is None:
        priority = LOWEST_PRIORITY
    tokens_as_ids = boolean(given, "return_tokens_as_token_ids", problems)
    metadata = chat_fields.read_metadata(given, problems)
    requests = (_checked_request(request, given, problems),)
    config = _config(given, text, reasoning, tier, metadata)
    _check_config(config, problems)
    problems.raise_any()
    options = ResponseOptions(
        config=config,
        store=store,
        background=background,
        logprobs=logprobs,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        tools=tools.allowed,
        parallel_tool_calls=parallel,
        has_summary=reasoning["summary"] is not None,
        tokens_as_ids=tokens_as_ids,
        service_tier=tier,
    )
    return Call(given["model"], requests, options, stream, priority, prefix_key, window, tuple(items), problems.ignored)


def _read_stream(given: Mapping[str, Any], problems: Problems) -> bool:
    stream = boolean(given, "stream", problems)
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping):
        problems.must("stream_options", "be a map", shown(options))
    elif "stream_options" in given and not stream:
        problems.add("stream_options", "stream_options requires stream: true")
    else:
        problems.unknown_fields("stream_options", options, ("include_obfuscation",))
    return stream


def _read_text(given: Mapping[str, Any], sampling: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """Return the object's `text`, and set the structured output that it asks for."""
    text = given.get("text", {})
    if not isinstance(text, Mapping):
        problems.must("text", "be a map", shown(text))
        text = {}
    problems.unknown_fields("text", text, ("format", "verbosity"))
    chat_fields.check_verbosity("text.verbosity", text, "instructions", problems)
    wanted = text.get("format", {"type": "text"})
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind not in _TEXT_FORMATS:
        problems.must("text.format.type", f"be one of {', '.join(_TEXT_FORMATS)}", named(kind))
        wanted = {"type": "text"}
    elif "structured_outputs" in sampling and kind != "text":
        problems.add("text.format", "give text.format or structured_outputs, not both")
    elif kind == "json_schema":
        wanted = _json_schema(wanted, problems)
        call_fields.read_response_format({"response_format": {"type": kind, "json_schema": wanted}}, sampling, problems)
        wanted = {"type": kind, "description": None, "strict": None, **wanted}
    else:
        problems.unknown_fields("text.format", wanted, ("type",))
        call_fields.read_response_format({"response_format": {"type": kind}}, sampling, problems)
    return {"format": dict(wanted), "verbosity": "medium"}


def _json_schema(wanted: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    given = dict(wanted)
    problems.unknown_fields("text.format", given, ("type", "name", "description", "schema", "strict"))
    if not isinstance(given.get("schema"), Mapping):
        problems.must("text.format.schema", "be a map", shown(given.get("schema")))
        given["schema"] = {}
    elif (problem := data_problem("text.format.schema", given["schema"])) is not None:
        problems.add("text.format.schema", problem)
    for name, kind, told in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("strict", bool, "a boolean"),
    ):
        if name in given and not isinstance(given[name], kind):
            problems.must(f"text.format.{name}", f"be {told}", shown(given[name]))
    return {"name": "response", **{name: value for name, value in given.items() if name != "type"}}


def _read_reasoning(given: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Return the object's `reasoning`."""
    reasoning = given.get("reasoning", {})
    if not isinstance(reasoning, Mapping):
        problems.must("reasoning", "be a map", shown(reasoning))
        reasoning = {}
    problems.unknown_fields("reasoning", reasoning, ("effort", "summary", "generate_summary"))
    for name in ("summary", "generate_summary"):
        summary = reasoning.get(name)
        if summary is not None and summary not in SUMMARIES:
            problems.must(f"reasoning.{name}", f"be one of {', '.join(SUMMARIES)}", named(summary))
    return {
        "effort": reasoning.get("effort"),
        "summary": reasoning.get("summary", reasoning.get("generate_summary")),
    }


def _read_logprobs(given: Mapping[str, Any], problems: Problems) -> int | None:
    include = given.get("include", [])
    if not isinstance(include, list) or not all(name in (*INCLUDABLE, *NEVER_INCLUDED) for name in include):
        problems.must("include", f"be a list of {', '.join((*INCLUDABLE, *NEVER_INCLUDED))}", shown(include))
        include = []
    top = checked(given, "top_logprobs", problems)
    return (top or 0) if top or INCLUDABLE[0] in include else None


def _read_tools(given: Mapping[str, Any], sampling: Mapping[str, Any], problems: Problems) -> Tools:
    """Check tools and their choice. In the Responses API a tool has no `function` object."""
    nested = {"tools": given["tools"]} if "tools" in given else {}
    if isinstance(nested.get("tools"), list):
        nested["tools"] = [_nested(tool) for tool in nested["tools"]]
    choice = given.get("tool_choice")
    if isinstance(choice, Mapping):
        choice = _nested(choice)
        if choice.get("type") == "allowed_tools":
            listed = choice.get("tools")
            listed = [_nested(tool) for tool in listed] if isinstance(listed, list) else listed
            choice = {"type": "allowed_tools", "allowed_tools": {**choice, "tools": listed}}
    if choice is not None:
        nested["tool_choice"] = choice
    tools = read_tools(nested, problems, function="")
    has_format = isinstance(given.get("text"), Mapping) and "format" in given["text"]
    if has_format and "structured_outputs" in sampling and tools.shown:
        problems.add("text.format", "text.format excludes tools: its grammar permits no call")
    return tools


def _nested(tool: Any) -> Any:
    if not is_function(tool):
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _messages(
    given: Mapping[str, Any], items: Sequence[Item], model: RegisteredModel | None, problems: Problems
) -> list[dict[str, Any]]:
    messages = messages_of(items, knows_developer=model is not None and model.template.developer)
    instructions = given.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        problems.must("instructions", "be a string", shown(instructions))
    elif instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    truncation = given.get("truncation", "disabled")
    if truncation not in TRUNCATIONS:
        problems.must("truncation", f"be one of {', '.join(TRUNCATIONS)}", shown(truncation))
    elif truncation != "disabled":
        problems.ignore("truncation", "truncation must be disabled or absent: shorten the input before it is sent")
    previous = given.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        problems.must("previous_response_id", "be a string", shown(previous))
    return messages


def _config(
    given: Mapping[str, Any],
    text: dict[str, Any],
    reasoning: dict[str, Any],
    tier: str | None,
    metadata: dict[str, str] | None,
) -> dict[str, Any]:
    """Return the object's fields that the request determines, with OpenAI's defaults."""
    return {
        "previous_response_id": given.get("previous_response_id"),
        "instructions": given.get("instructions"),
        "tools": [_tool_shape(tool) for tool in given.get("tools", []) if is_function(tool)],
        "tool_choice": given.get("tool_choice", "auto"),
        "truncation": "disabled",
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "text": text,
        "temperature": given.get("temperature", 1.0),
        "top_p": given.get("top_p", 1.0),
        "presence_penalty": given.get("presence_penalty", 0.0),
        "frequency_penalty": given.get("frequency_penalty", 0.0),
        "top_logprobs": given.get("top_logprobs", 0),
        "reasoning": reasoning,
        "max_output_tokens": given.get("max_output_tokens"),
        "max_tool_calls": given.get("max_tool_calls"),
        "store": given.get("store", True),
        "background": given.get("background", False),
        "service_tier": tier or "default",
        "metadata": metadata or {},
        "user": given.get("user"),
        "safety_identifier": given.get("safety_identifier"),
        "prompt_cache_key": given.get("prompt_cache_key"),
    }


def _check_config(config: Mapping[str, Any], problems: Problems) -> None:
    """Refuse values that the envelope cannot store, before anything is stored."""
    for name in ("user", "safety_identifier"):
        if not isinstance(config[name], str | None):
            problems.must(name, "be a string", shown(config[name]))
            config = {**config, name: None}
    for name, value in config.items():
        if (problem := data_problem(name, value)) is not None:
            problems.add(name, problem)


def _tool_shape(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None, **tool}


def _checked_request(request: Mapping[str, Any], given: Mapping[str, Any], problems: Problems) -> GenerateRequest:
    names = {"tools": "tools", "chat_template_kwargs": "chat_template_kwargs", "max_tokens": "max_output_tokens"}
    if "structured_outputs" not in given:
        names["structured_outputs"] = "text.format" if "text" in given else "tools"
    return call_fields.checked_request(request, names, problems, messages="input")
