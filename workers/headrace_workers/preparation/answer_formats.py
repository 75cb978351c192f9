"""The formats in which a model writes tool calls and reasoning: detected in its chat template, or set by the operator.

Clients that parse tool calls out of an answer's text, such as the gateway, find the names in the registry of models.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final

from headrace_broker import TemplateFeatures
from headrace_engine.text.chat_template import reads_variable, written_call
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_parts import TokenizerParts

DEEPSEEK_TAG: Final = "<\uff5ctool\u2581calls\u2581begin\uff5c>"  # with a wide bar and a lower block
_CALL_BEGIN, _CALL_END, _SEPARATOR = (
    f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "call\u2581end", "sep")
)
# A format, and the texts that all chat templates of its models contain. The first match is taken.
_TOOL_FORMATS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("openai", ("<|channel|>",)),
    ("deepseek_v3", (DEEPSEEK_TAG, "```json")),
    ("deepseek_v31", (DEEPSEEK_TAG,)),
    ("qwen3_xml", ("<function=", "<parameter=")),
    ("glm45", ("<arg_key>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4_mini_json", ("functools[",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>", "arguments")),
    ("pythonic", ("[func_name1(params_name1=params_value1",)),
    ("pythonic", ("<function_calls>",)),
    ("llama3_json", ('{"name": function name, "parameters": dictionary of argument name',)),
)
# Llama 4's template asks for this format, but shows earlier calls in another one.
_ASKED_FOR: Final = "[func_name1(params_name1=params_value1"
_REASONING_FORMATS: Final = (
    ("openai", "<|channel|>"),
    ("mistral", "[THINK]"),
    ("think", "<think>"),
    ("think", "</think>"),
    ("think", "<seed:think>"),
    ("think", "enable_thinking"),
)
TOOL_FORMATS: Final = tuple(dict.fromkeys(name for name, _ in _TOOL_FORMATS))
REASONING_FORMATS: Final = tuple(dict.fromkeys(name for name, _ in _REASONING_FORMATS))

_NAME: Final = "probe_tool_a"
_JSON: Final = r'\{\s*"probe_text_a":\s*"probe_value_a",\s*"probe_count_a":\s*7\s*\}'
_OBJECT: Final = rf'\{{\s*"name":\s*"{_NAME}",\s*"(arguments|parameters)":\s*{_JSON}[^{{}}]*\}}'
_PARAMETER: Final = r"<parameter={}>\s*{}\s*</parameter>\s*"
_ARGUMENT: Final = r"<arg_key>{}</arg_key>\s*<arg_value>{}</arg_value>\s*"
_PAIRS: Final = (("probe_text_a", "probe_value_a"), ("probe_count_a", "7"))
# How each format writes the probe, the call that `written_call` renders. White space between its parts may vary.
_CALLS: Final = {
    "openai": rf"to=functions\.{_NAME}[^{{}}]*<\|message\|>{_JSON}<\|call\|>",
    "deepseek_v3": (
        rf"({DEEPSEEK_TAG})?\s*{_CALL_BEGIN}function{_SEPARATOR}{_NAME}\s*```json\s*{_JSON}\s*```\s*{_CALL_END}"
    ),
    "deepseek_v31": rf"({DEEPSEEK_TAG})?\s*{_CALL_BEGIN}{_NAME}{_SEPARATOR}{_JSON}{_CALL_END}",
    "qwen3_xml": (
        rf"<(seed:)?tool_call>\s*<function={_NAME}>\s*{''.join(_PARAMETER.format(*pair) for pair in _PAIRS)}"
        r"</function>\s*</(seed:)?tool_call>"
    ),
    "glm45": rf"<tool_call>{_NAME}\s*{''.join(_ARGUMENT.format(*pair) for pair in _PAIRS)}</tool_call>",
    "mistral": rf"\[TOOL_CALLS\]\s*(\[\s*{_OBJECT}\s*\]|{_NAME}(\[CALL_ID\]\w+)?\[ARGS\]{_JSON})",
    "phi4_mini_json": rf"functools\[\s*{_OBJECT}\s*\]",
    "granite": rf"<\|tool_call\|>\s*\[\s*{_OBJECT}\s*\]|<function_call>\s*{_OBJECT}",
    "hermes": rf"<tool_call>\s*{_OBJECT}\s*</tool_call>",
    "pythonic": (
        r"^\s*(<\|python_start\|>|<function_calls>)?\s*\[?"
        rf"""{_NAME}\(probe_text_a=["']probe_value_a["'], probe_count_a=7\)\]?"""
        r"\s*(<\|python_end\|>|</function_calls>)?"
    ),
    "llama3_json": rf"^\s*(<\|python_tag\|>)?\s*{_OBJECT}",
}
# Before or after a call, these texts are part of a tag that none of our parsers knows.
_TAG_OF_CALL: Final = re.compile("probe_|tool|function|call|action|invoke", re.IGNORECASE)


def tool_format_of(parts: TokenizerParts) -> str | None:
    """Return the format of tool calls; None if it is not known.

    A template that can write earlier calls is rendered with a call, which shows the format. Any other template is
    searched for the texts of each format.
    """
    template = parts.tool_chat_template or parts.chat_template or ""
    if not reads_variable(template, "tools"):
        return None
    written = (
        written_call(template, parts.special_tokens)
        if "tool_calls" in template and _ASKED_FOR not in template
        else None
    )
    if written is not None:
        return next((name for name in TOOL_FORMATS if _writes(name, written)), None)
    return next((name for name, texts in _TOOL_FORMATS if all(text in template for text in texts)), None)


def _writes(name: str, written: str) -> bool:
    """Return whether a text is the call of the probe in this format, with nothing of another format around it."""
    rest = re.sub(_CALLS[name], "", written, count=1)
    return rest != written and _TAG_OF_CALL.search(rest) is None


def reasoning_format_of(parts: TokenizerParts) -> str | None:
    """Return the format of reasoning; None if it is not known."""
    template = parts.tool_chat_template or parts.chat_template or ""
    return next((name for name, text in _REASONING_FORMATS if text in template), None)


_TAGS: Final = {
    "openai": ("<|channel|>",),
    "deepseek_v3": (DEEPSEEK_TAG,),
    "deepseek_v31": (DEEPSEEK_TAG,),
    "qwen3_xml": ("<tool_call>",),
    "glm45": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "granite": ("<|tool_call|>",),
    "hermes": ("<tool_call>",),
    "llama3_json": ("<|python_tag|>",),
}
_THINK_TAGS: Final = {
    "openai": ("<|channel|>",),
    "mistral": ("[THINK]", "[/THINK]", "<think>", "</think>"),
    "think": ("<think>", "</think>", "<seed:think>", "</seed:think>"),
}
AUTO: Final = "auto"
NONE: Final = "none"
HARMONY: Final = "openai"


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The operator's choice: the name of a format, `none`, or `auto` to detect the format in the chat template."""

    tool_parser: str = AUTO
    reasoning_parser: str = AUTO

    def of(self, parts: TokenizerParts, tokenizer: ModelTokenizer) -> dict[str, Any]:
        """Return the keyword arguments of `register_model` for a model with this tokenizer and its parts."""
        template = parts.tool_chat_template or parts.chat_template or ""
        tool_parser = tool_format_of(parts) if self.tool_parser == AUTO else self._named(self.tool_parser)
        reasoning_parser = (
            reasoning_format_of(parts) if self.reasoning_parser == AUTO else self._named(self.reasoning_parser)
        )
        if not are_compatible(tool_parser, reasoning_parser):  # the operator's choice overrides the template
            if self.tool_parser == AUTO:
                tool_parser = None
            else:
                reasoning_parser = HARMONY
        # the special tokens, which decoding skips
        skipped = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.special}
        features = TemplateFeatures(
            exists=bool(template),
            tools=reads_variable(template, "tools"),
            developer="developer" in template,
            thinking=next((name for name in ("enable_thinking", "thinking") if reads_variable(template, name)), None),
            reasoning_effort=reads_variable(template, "reasoning_effort"),
            special_tags=not skipped.isdisjoint(_TAGS.get(tool_parser or "", ())),
            special_think_tags=not skipped.isdisjoint(_THINK_TAGS.get(reasoning_parser or "", ())),
        )
        return {
            "tokenizer": fingerprint_of(parts),
            "tool_parser": tool_parser,
            "reasoning_parser": reasoning_parser,
            "template": features,
        }

    @staticmethod
    def _named(configured: str) -> str | None:
        return None if configured == NONE else configured


def are_compatible(tool_parser: str | None, reasoning_parser: str | None) -> bool:
    """Return whether a client can use both: the gpt-oss format combines calls and reasoning."""
    return tool_parser != HARMONY or reasoning_parser in (None, HARMONY)


def fingerprint_of(parts: TokenizerParts) -> str:
    """Return a digest that is equal for tokenizers that make the same token ids from a text and from a chat."""
    content = repr((parts.tokenizer_json, parts.chat_template, parts.tool_chat_template))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
