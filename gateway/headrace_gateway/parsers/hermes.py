"""Hermes, Qwen 2.5 and 3, Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from headrace_gateway.parsers.event_writer import EventWriter
from headrace_gateway.parsers.json_call import Found, Kept, read_calls
from headrace_gateway.parsers.text_reader import Sink, Steps, TagSet, TextReader

_OPEN = "<tool_call>"
_TAGS = TagSet(_OPEN, "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|end_of_text|>")
_CLOSE = TagSet("</tool_call>")


def read(reader: TextReader, writer: EventWriter, text: Sink) -> Steps[None]:
    """Read calls among text to the end."""
    while (tag := (yield from reader.until(_TAGS, text))) is not None:
        if tag != _OPEN:
            continue
        kept = Kept(tag)
        found = yield from read_calls(reader, writer, kept)
        if found is Found.CALL:
            text = writer.content
            yield from reader.space()
            yield from reader.next_is(_CLOSE)
        elif found is Found.OTHER:
            kept.goes_to(text)
        else:
            writer.trim()
