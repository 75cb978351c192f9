"""The formats in which a model writes tool calls and reasoning: detected in its chat template, or set by the operator.

Clients that parse tool calls out of an answer's text, such as the gateway, find the names in the registry of models.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from headrace_broker import TemplateTraits
from headrace_engine.chat_template import reads_variable
from headrace_engine.tokenizer import ModelTokenizer
from headrace_engine.tokenizer_parts import TokenizerParts

_DEEPSEEK_TAG: Final = "<\uff5ctool\u2581calls\u2581begin\uff5c>"  # with a wide bar and a lower block
# A format, and the texts that all chat templates of its models contain. The first match is taken.
_TOOL_FORMATS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("openai", ("<|channel|>",)),
    ("deepseek_v3", (_DEEPSEEK_TAG, "```json")),
    ("deepseek_v31", (_DEEPSEEK_TAG,)),
    ("qwen3_xml", ("<function=",)),
    ("glm45", ("<arg_key>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4_mini_json", ("functools[",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(params_name1=params_value1",)),
    ("pythonic", ("<function_calls>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": ',)),
)
_REASONING_FORMATS: Final = (
    ("openai", "<|channel|>"),
    ("mistral", "[THINK]"),
    ("think", "<think>"),
    ("think", "</think>"),
    ("think", "enable_thinking"),
)
_TAGS: Final = {
    "openai": ("<|channel|>",),
    "deepseek_v3": (_DEEPSEEK_TAG,),
    "deepseek_v31": (_DEEPSEEK_TAG,),
    "qwen3_xml": ("<tool_call>",),
    "glm45": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "granite": ("<|tool_call|>",),
    "hermes": ("<tool_call>",),
    "llama3_json": ("<|python_tag|>",),
}
TOOL_FORMATS: Final = tuple(dict.fromkeys(name for name, _ in _TOOL_FORMATS))
REASONING_FORMATS: Final = tuple(dict.fromkeys(name for name, _ in _REASONING_FORMATS))
AUTO: Final = "auto"
NONE: Final = "none"
HARMONY: Final = "openai"


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The operator's choice: the name of a format, `none`, or `auto` to detect the format in the chat template."""

    tool_parser: str = AUTO
    reasoning_parser: str = AUTO

    def of(self, parts: TokenizerParts, tokenizer: ModelTokenizer) -> dict[str, Any]:
        """Return the keyword arguments of `register_model` for a model with this tokenizer, made of these parts."""
        template = parts.tool_chat_template or parts.chat_template or ""
        tool_parser = self._choose(self.tool_parser, tool_format_of(template))
        reasoning = next((name for name, text in _REASONING_FORMATS if text in template), None)
        reasoning_parser = self._choose(self.reasoning_parser, reasoning)
        if not are_compatible(tool_parser, reasoning_parser):  # the operator's choice overrides the template
            if self.tool_parser == AUTO:
                tool_parser = None
            else:
                reasoning_parser = HARMONY
        # decoding skips them
        skipped = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.special}
        traits = TemplateTraits(
            exists=bool(template),
            tools=reads_variable(template, "tools"),
            developer="developer" in template,
            thinking=next((name for name in ("enable_thinking", "thinking") if reads_variable(template, name)), None),
            reasoning_effort=reads_variable(template, "reasoning_effort"),
            special_tags=bool(skipped & set(_TAGS.get(tool_parser or "", ()))),
        )
        return {
            "tokenizer": fingerprint_of(parts),
            "tool_parser": tool_parser,
            "reasoning_parser": reasoning_parser,
            "template": traits,
        }

    @staticmethod
    def _choose(configured: str, detected: str | None) -> str | None:
        return detected if configured == AUTO else None if configured == NONE else configured


def are_compatible(tool_parser: str | None, reasoning_parser: str | None) -> bool:
    """Return whether a client can use both: the gpt-oss format combines calls and reasoning."""
    return tool_parser != HARMONY or reasoning_parser in (None, HARMONY)


def fingerprint_of(parts: TokenizerParts) -> str:
    """Return a digest that is equal for tokenizers that make the same token ids from a text and from a chat."""
    content = repr((parts.tokenizer_json, parts.chat_template, parts.tool_chat_template))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def tool_format_of(template: str) -> str | None:
    """Return the format of tool calls in this chat template, or None if it has no known format."""
    if not reads_variable(template, "tools"):
        return None
    return next((name for name, texts in _TOOL_FORMATS if all(text in template for text in texts)), None)
