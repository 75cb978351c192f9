"""The fields of a chat about tools: which functions exist, which may be called, and which must be called."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from headrace_gateway.requests.call import Function, ToolChoice
from headrace_gateway.requests.problems import Problems
from headrace_wire.codes import ErrorCode
from headrace_wire.values import data_problem, named, shown

MAX_TOOLS: Final = 128
NAME_PATTERN: Final = "[A-Za-z0-9_-]{1,64}"
_NAME: Final = re.compile(NAME_PATTERN)
_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict")


def check_name(path: str, name: object, problems: Problems) -> bool:
    """Return whether a function may have this name; add a problem if not."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return True
    problems.must(f"{path}.name", "be 1 to 64 of the characters A-Z a-z 0-9 _ -", shown(name))
    return False


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a body and their choice."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    """The tools as the chat template receives them."""
    allowed: tuple[Function, ...] = ()
    choice: ToolChoice = "none"
    """`named`: the one allowed function must be called."""


def read_tools(given: Mapping[str, Any], problems: Problems, *, function: str = ".function") -> Tools:
    """Check `tools` and `tool_choice`.

    Args:
        function: the path from a tool to its function, for errors; empty if the tool itself is the function.
    """
    tools = given.get("tools", [])
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        problems.add("tools", f"tools must be a list of at most {MAX_TOOLS} functions, got {_size(tools)}")
        return Tools()
    functions = [_read_tool(f"tools[{position}]", tool, problems, function) for position, tool in enumerate(tools)]
    tools = [_shown(tool["function"]) for tool, function in zip(tools, functions, strict=True) if function is not None]
    known = {function.name: function for function in functions if function is not None}
    if len(known) < sum(function is not None for function in functions):
        problems.add("tools", "tools must contain functions with distinct names")
    choice, names = _read_choice(given.get("tool_choice"), known, problems, function)
    if not tools:
        if choice not in ("auto", "none"):
            problems.add("tool_choice", "tool_choice requires tools")
        return Tools()
    if choice == "none":
        return Tools()
    return Tools(tools, tuple(function for name, function in known.items() if name in names), choice)


def is_function(tool: Any) -> bool:
    """Return whether a tool is a function. The service and its models know no other kinds."""
    return isinstance(tool, Mapping) and tool.get("type") == "function"


def _shown(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: function[name] for name in _FUNCTION_FIELDS if name in function}}


def _read_tool(path: str, tool: Any, problems: Problems, place: str) -> Function | None:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(kind, str) and kind != "function":
        name = f"tools[{kind[:64]}]"
        problems.ignore(name, f"{path}.type must be function, got {kind[:40]!r}")
        return None
    if not is_function(tool) or not isinstance(tool.get("function"), Mapping):
        told = f", got {kind[:40]!r}" if isinstance(kind, str) else ""
        holds = " and a function" if place else ""
        problems.add(f"{path}.type", f"{path} must be a map with type function{holds}{told}", ErrorCode.UNSUPPORTED)
        return None
    function = tool["function"]
    problems.unknown_fields(path, tool, ("type", "function"))
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    path += place
    problems.unknown_fields(path, function, _FUNCTION_FIELDS)
    if not isinstance(function.get("description", ""), str | None):
        problems.must(f"{path}.description", "be a string", shown(function["description"]))
    fine = check_name(path, name, problems)
    if parameters is not None and not isinstance(parameters, Mapping):
        problems.must(f"{path}.parameters", "be a JSON Schema object", shown(parameters))
        fine = False
    elif parameters is not None and (problem := data_problem(f"{path}.parameters", parameters)) is not None:
        problems.add(f"{path}.parameters", problem)
        fine = False
    if strict is not None and not isinstance(strict, bool):
        problems.must(f"{path}.strict", "be true or false", shown(strict))
        fine = False
    if not fine:
        return None
    return Function(str(name), dict(parameters) if parameters is not None else None, bool(strict))


def _read_choice(
    choice: Any, known: Mapping[str, Function], problems: Problems, place: str
) -> tuple[ToolChoice, set[str]]:
    """Return the kind of choice, and the functions that may be called."""
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto", set(known)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        name = _function_name(choice)
        if name not in known:
            problems.must(f"tool_choice{place}.name", "be one of the functions in tools", named(name))
        return "named", {str(name)}
    if kind == "allowed_tools" and isinstance(choice.get("allowed_tools"), Mapping):
        allowed = choice["allowed_tools"]
        listed = allowed.get("tools")
        names = {_function_name(tool) for tool in listed} if isinstance(listed, list) else set()
        if allowed.get("mode") not in ("auto", "required") or not names or not names <= set(known):
            where = "tool_choice.allowed_tools" if place else "tool_choice"
            problems.add(where, f"{where} must have mode auto or required, and a list tools of functions in tools")
            return "auto", set()
        return allowed["mode"], {str(name) for name in names}
    rule = "be none, auto, required, or a map with type function or allowed_tools"
    problems.must("tool_choice", rule, shown(choice))
    return "auto", set(known)


def _function_name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _size(tools: Any) -> str:
    return str(len(tools)) if isinstance(tools, list) else shown(tools)
