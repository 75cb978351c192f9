"""`POST /v1/responses`: check its body and make the request from it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace_broker import RegisteredModel, SubmitRequest
from headrace_broker.value_rules import data_problem
from headrace_gateway import call_fields, chat_fields, field_tables
from headrace_gateway.call import Call, ResponseForm
from headrace_gateway.call_fields import MAX_LOGPROBS, MAX_TOKENS, boolean, integer
from headrace_gateway.input_items import Item, messages_of, read_items
from headrace_gateway.problems import Problems, shown
from headrace_gateway.tool_fields import Tools, read_tools

INCLUDABLE: Final = ("message.output_text.logprobs", "reasoning.encrypted_content")
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
    sampling["max_tokens"] = integer(given, "max_output_tokens", 1, MAX_TOKENS, problems) or (
        call_fields.rest_of_context(model)
    )
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
    request = _request(given, [*history, *items], sampling, model, problems)
    request.update(call_fields.read_cache_key(given, problems))
    chat_fields.add_template_options(request, {}, tools, variables, model, problems)
    store = boolean(given, "store", problems, default=True)
    background = boolean(given, "background", problems)
    tokens_as_ids = boolean(given, "return_tokens_as_token_ids", problems)
    metadata = chat_fields.read_metadata(given, problems)
    _check(request, given, problems)
    problems.raise_any()
    config = _config(given, text, reasoning, tier, metadata)
    _check_config(config, problems)
    problems.raise_any()
    if lora:
        request["lora"] = lora
    form = ResponseForm(
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
    return Call(given["model"], (request,), form, stream, priority, tuple(items))


def _read_stream(given: Mapping[str, Any], problems: Problems) -> bool:
    stream = boolean(given, "stream", problems)
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping):
        problems.add("stream_options", f"stream_options must be an object, not {shown(options)}")
    elif "stream_options" in given and not stream:
        problems.add("stream_options", "stream_options requires stream: true")
    else:
        problems.unknown_fields("stream_options", options, ("include_obfuscation",))
    return stream


def _read_text(given: Mapping[str, Any], sampling: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """Return the object's `text`, and set the structured output that it asks for."""
    text = given.get("text", {})
    if not isinstance(text, Mapping):
        problems.add("text", f"text must be an object, not {shown(text)}")
        text = {}
    text = call_fields.without_nulls(text)
    problems.unknown_fields("text", text, ("format", "verbosity"))
    if text.get("verbosity", "medium") != "medium":
        problems.unsupported("text.verbosity", "text.verbosity must be medium or absent: ask in the instructions")
    form = text.get("format", {"type": "text"})
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind not in _TEXT_FORMATS:
        message = f"text.format must be an object with type {', '.join(_TEXT_FORMATS[:-1])} or {_TEXT_FORMATS[-1]}"
        problems.add("text.format.type", message)
        form = {"type": "text"}
    elif "structured_outputs" in sampling and kind != "text":
        problems.add("text.format", "give text.format or structured_outputs, not both")
    elif kind == "json_schema":
        form = _json_schema(form, problems)
        call_fields.read_response_format({"response_format": {"type": kind, "json_schema": form}}, sampling, problems)
        form = {"type": kind, "description": None, "strict": None, **form}
    else:
        problems.unknown_fields("text.format", form, ("type",))
        call_fields.read_response_format({"response_format": {"type": kind}}, sampling, problems)
    return {"format": dict(form), "verbosity": "medium"}


def _json_schema(form: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    given = call_fields.without_nulls(form)
    problems.unknown_fields("text.format", given, ("type", "name", "description", "schema", "strict"))
    if not isinstance(given.get("schema"), Mapping):
        problems.add("text.format.schema", f"text.format.schema must be an object, not {shown(given.get('schema'))}")
        given["schema"] = {}
    elif (problem := data_problem("text.format.schema", given["schema"])) is not None:
        problems.add("text.format.schema", problem)
    for name, kind, told in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("strict", bool, "a boolean"),
    ):
        if name in given and not isinstance(given[name], kind):
            problems.add(f"text.format.{name}", f"text.format.{name} must be {told}, not {shown(given[name])}")
    return {"name": "response", **{name: value for name, value in given.items() if name != "type"}}


def _read_reasoning(given: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Return the object's `reasoning`."""
    reasoning = given.get("reasoning", {})
    if not isinstance(reasoning, Mapping):
        problems.add("reasoning", f"reasoning must be an object, not {shown(reasoning)}")
        reasoning = {}
    reasoning = call_fields.without_nulls(reasoning)
    problems.unknown_fields("reasoning", reasoning, ("effort", "summary", "generate_summary"))
    summary = reasoning.get("summary", reasoning.get("generate_summary"))
    if summary is not None and summary not in SUMMARIES:
        problems.add("reasoning.summary", f"reasoning.summary must be one of {', '.join(SUMMARIES)}")
    return {"effort": reasoning.get("effort"), "summary": summary}


def _read_logprobs(given: Mapping[str, Any], problems: Problems) -> int | None:
    include = given.get("include", [])
    if not isinstance(include, list) or not all(name in INCLUDABLE for name in include):
        problems.add("include", f"include must be an array of {' and '.join(INCLUDABLE)}")
        include = []
    top = integer(given, "top_logprobs", 0, MAX_LOGPROBS, problems)
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
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _request(
    given: Mapping[str, Any],
    items: Sequence[Item],
    sampling: dict[str, Any],
    model: RegisteredModel | None,
    problems: Problems,
) -> SubmitRequest:
    messages = messages_of(items, knows_developer=model is not None and model.template.developer)
    instructions = given.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        problems.add("instructions", f"instructions must be a string, not {shown(instructions)}")
    elif instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    if given.get("truncation", "disabled") != "disabled":
        problems.unsupported("truncation", "truncation must be disabled or absent: shorten the input before it is sent")
    previous = given.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        problems.add("previous_response_id", f"previous_response_id must be a string, not {shown(previous)}")
    return {"messages": messages, "sampling_params": sampling}


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
        "tools": [_tool_shape(tool) for tool in given.get("tools", [])],
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
        "max_tool_calls": None,
        "store": given.get("store", True),
        "background": given.get("background", False),
        "service_tier": tier or "default",
        "metadata": metadata or {},
        "user": given.get("user"),
        "safety_identifier": given.get("safety_identifier"),
        "prompt_cache_key": given.get("prompt_cache_key"),
    }


def _check_config(config: Mapping[str, Any], problems: Problems) -> None:
    """Refuse what the envelope cannot store, before anything is stored."""
    for name in ("user", "safety_identifier"):
        if not isinstance(config[name], str | None):
            problems.add(name, f"{name} must be a string, not {shown(config[name])}")
            config = {**config, name: None}
    for name, value in config.items():
        if (problem := data_problem(name, value)) is not None:
            problems.add(name, problem)


def _tool_shape(tool: Any) -> Any:
    return {"description": None, "parameters": None, "strict": None, **tool} if isinstance(tool, Mapping) else tool


def _check(request: SubmitRequest, given: Mapping[str, Any], problems: Problems) -> None:
    names = {"tools": "tools", "chat_template_kwargs": "chat_template_kwargs", "max_tokens": "max_output_tokens"}
    if "structured_outputs" not in given:
        names["structured_outputs"] = "text.format" if "text" in given else "tools"
    call_fields.check_request(request, names, problems, messages="input")
