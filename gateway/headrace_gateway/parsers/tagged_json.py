"""Formats with calls as JSON objects after a tag: Hermes, Granite, Phi-4-mini and Llama 3."""

from headrace_gateway.parsers.events import EventWriter
from headrace_gateway.parsers.json_call import Found, PendingText, read_calls, read_tagged
from headrace_gateway.parsers.text_reader import Steps, TagSet, TextReader


class TaggedJson:
    """One format.

    Args:
        opening: tags that precede calls.
        closing: tags that may end calls.
        special: special tokens, which are not part of the text.
    """

    def __init__(self, opening: tuple[str, ...], closing: tuple[str, ...], special: tuple[str, ...]) -> None:
        self._opening = opening
        self._tags = TagSet(*opening, *special)
        self._closing = TagSet(*closing)

    def read(self, reader: TextReader, writer: EventWriter) -> Steps[None]:
        """Read calls and the text around them to the end."""
        return read_tagged(reader, writer, self._tags, self._opening, self._read_calls)

    def _read_calls(self, reader: TextReader, writer: EventWriter, _tag: str, pending: PendingText) -> Steps[Found]:
        found = yield from read_calls(reader, writer, pending)
        if found is Found.CALL:
            yield from reader.space()
            yield from reader.next_is(self._closing)
        return found


# Qwen 2.5 and 3 and Granite 4 use the format of Hermes.
HERMES = TaggedJson(
    ("<tool_call>",), ("</tool_call>",), ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|end_of_text|>")
)
# <|tool_call|> and an array: Granite 3; <function_call>: Granite 20B; <tool_call>: sometimes Granite 3.1, and 4.
GRANITE = TaggedJson(
    ("<|tool_call|>", "<function_call>", "<tool_call>"),
    ("<|/tool_call|>", "</function_call>", "</tool_call>"),
    ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
)
PHI4_MINI = TaggedJson(
    ("functools[", "<|tool_call|>"), ("<|/tool_call|>",), ("<|end|>", "<|endoftext|>", "<|assistant|>")
)

_PYTHON_TAG = "<|python_tag|>"
_TAGS = TagSet(
    _PYTHON_TAG, "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"
)  # fmt: skip


def read_llama3(reader: TextReader, writer: EventWriter) -> Steps[None]:
    """Read calls at the start and after each tag. JSON elsewhere is content, and so is Python after the tag.

    The whole answer is `{"name": ..., "parameters": {...}}`, or it follows `<|python_tag|>`.
    """
    tag: str | None = _PYTHON_TAG
    while tag is not None:
        if tag == _PYTHON_TAG:
            pending = PendingText()
            char = yield from reader.space(pending)
            if char not in ("{", "[") or (yield from read_calls(reader, writer, pending)) is not Found.CALL:
                pending.send_to(writer.content)
        tag = yield from reader.until(_TAGS, writer.content)
