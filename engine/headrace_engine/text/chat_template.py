"""Renders conversations with chat templates.

Imports transformers when the first chat is rendered.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace_engine.errors import InvalidRequestError
from headrace_engine.text.chat import ChatOptions, joined
from headrace_engine.text.chat_history import PROBE_TOOLS, HistoryForm, find_form, fitted, has_calls, probe_call


def read_template(given: str | Path | None) -> str | None:
    """Return a template. If `given` is the path of a file, return the content of the file.

    Raises:
        InvalidRequestError: there is no such file.
    """
    if given is None:
        return None
    if isinstance(given, str) and any(sign in given for sign in "{}\n"):
        return given
    try:
        return Path(given).read_text()
    except (OSError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"chat_template is no template, and no file that can be read: {error}") from error


def rendered(
    template: str, conversation: Sequence[Mapping[str, Any]], options: ChatOptions, special_tokens: Mapping[str, str]
) -> str:
    """Render as transformers' `apply_chat_template` does. Raises the exceptions of the template."""
    messages = for_template(template, conversation, options, special_tokens)
    return _render(template, messages, options, special_tokens)


def rendered_pair(template: str, messages: list[dict[str, Any]], special_tokens: Mapping[str, str]) -> str:
    """Render the query and the document of a pair as sentence-transformers does, without a turn of the assistant."""
    return _render(template, messages, ChatOptions(add_generation_prompt=False), special_tokens)


def _render(
    template: str, messages: list[dict[str, Any]], options: ChatOptions, special_tokens: Mapping[str, str]
) -> str:
    texts, _ = import_chat_templates().render_jinja_template(
        [messages],
        tools=options.tools,
        chat_template=template,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        **{**special_tokens, **(options.chat_template_kwargs or {})},
    )
    text: str = texts[0]
    return text


def for_template(
    template: str, conversation: Sequence[Mapping[str, Any]], options: ChatOptions, special_tokens: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Convert a conversation to the form that the template expects.

    Contents become text or lists of parts, and tool calls get the form of `history_form`.

    Raises:
        InvalidRequestError: the conversation has tool calls, which the template cannot show.
    """
    if has_calls(conversation):
        form = history_form(template, tuple(sorted(special_tokens.items())), has_tools=bool(options.tools))
        conversation = fitted(conversation, form)
    return _with_format(template, conversation, options)


@lru_cache(maxsize=32)
def history_form(template: str, special_tokens: tuple[tuple[str, str], ...], *, has_tools: bool) -> HistoryForm | None:
    """Return the form of tool calls that the template can show, or None. Renders up to a hundred probes."""
    options = ChatOptions(tools=PROBE_TOOLS if has_tools else None)
    return find_form(
        lambda messages: _render(template, _with_format(template, messages, options), options, dict(special_tokens))
    )


def written_call(template: str, special_tokens: Mapping[str, str]) -> str | None:
    """Return the text by which the assistant calls the first of PROBE_TOOLS, or None if the template shows no calls."""
    form = history_form(template, tuple(sorted(special_tokens.items())), has_tools=True)
    if form is None or form.calls_in_text:
        return None
    question = {"role": "user", "content": "Hello"}
    answer = {"role": "assistant", "content": "", "tool_calls": [probe_call("a")]}
    options = ChatOptions(tools=PROBE_TOOLS)
    prompt = rendered(template, [question], options, special_tokens)
    whole = rendered(template, [question, answer], replace(options, add_generation_prompt=False), special_tokens)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))
    start = sum(1 for _ in same)
    tag = whole.rfind("<", 0, start)
    return whole[tag if tag > whole.rfind(">", 0, start) else start :]


def _with_format(
    template: str, conversation: Sequence[Mapping[str, Any]], options: ChatOptions
) -> list[dict[str, Any]]:
    wanted = options.chat_template_content_format
    in_parts = wanted == "openai" or (wanted == "auto" and loops_over_content(template))
    converted = []
    for message in conversation:
        given = {name: value for name, value in message.items() if value is not None}
        content = message["content"]
        if content is not None:
            content = _as_parts(message) if in_parts else joined(content)
        converted.append({**given, "content": content})
    return converted


def _as_parts(message: Mapping[str, Any]) -> Any:
    content = message["content"]
    if isinstance(content, str) and content and message["role"] != "tool":
        return [{"type": "text", "text": content}]
    return content  # an empty text also works as an empty list, even in templates that read the first part


@lru_cache(maxsize=16)
def loops_over_content(template: str) -> bool:
    """Whether a template loops over the parts of a content, as the templates of vision models do."""
    from jinja2 import nodes

    def is_content(node: Any) -> bool:
        while isinstance(node, nodes.Filter | nodes.Test):
            node = node.node
        if isinstance(node, nodes.Getattr):
            return bool(node.attr == "content")
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name in names

    names = {"content"}
    tree = import_chat_templates()._compile_jinja_template(template).environment.parse(template)
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and is_content(assignment.node):
            names.add(assignment.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


@lru_cache(maxsize=64)
def reads_variable(template: str, name: str) -> bool:
    """Whether a Jinja template reads a variable that it does not set itself."""
    if name not in template:
        return False
    from jinja2 import Environment, TemplateError, meta

    # transformers' generation tag marks the text of the assistant. It has no effect here.
    template = re.sub(r"\{%-? (end)?generation -?%\}", "", template)
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)  # noqa: S701
    except TemplateError:  # the template has tags of an unknown extension
        return True
    return name in meta.find_undeclared_variables(tree)


def import_chat_templates() -> Any:
    """Import transformers' module that renders chats. The first import takes a second: call it when idle."""
    return import_module("transformers.utils.chat_template_utils")
