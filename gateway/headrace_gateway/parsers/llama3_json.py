"""Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, or it follows `<|python_tag|>`."""

from headrace_gateway.parsers.event_writer import EventWriter
from headrace_gateway.parsers.json_call import Found, PendingText, read_calls
from headrace_gateway.parsers.text_reader import Steps, TagSet, TextReader

_PYTHON_TAG = "<|python_tag|>"
_TAGS = TagSet(
    _PYTHON_TAG, "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"
)  # fmt: skip


def read(reader: TextReader, writer: EventWriter) -> Steps[None]:
    """Read calls at the start and after each tag. JSON elsewhere is content, and so is Python after the tag."""
    tag: str | None = _PYTHON_TAG
    while tag is not None:
        if tag == _PYTHON_TAG:
            pending = PendingText()
            char = yield from reader.space(pending)
            if char not in ("{", "[") or (yield from read_calls(reader, writer, pending)) is not Found.CALL:
                pending.send_to(writer.content)
        tag = yield from reader.until(_TAGS, writer.content)
