"""gpt-oss: messages `<|start|>assistant<|channel|>CHANNEL to=RECIPIENT<|message|>TEXT<|end|>`.

The analysis channel is reasoning. A recipient `functions.NAME` makes a message a call. All else is content.
"""

import re
from typing import Final

from headrace_gateway.parsers.events import EventWriter
from headrace_gateway.parsers.json_call import PendingText, read_arguments
from headrace_gateway.parsers.text_reader import Sink, Steps, TagSet, TextReader, drop

_MESSAGE: Final = "<|message|>"
_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_HEADER = TagSet(_START, _CHANNEL, _MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_FIRST = TagSet(_START, _CHANNEL, _MESSAGE, "to=")
_BEGIN = TagSet(_START, _CHANNEL)
# The reasoning may quote other tags.
_TEXT_END = TagSet("<|end|>", "<|return|>", _START)
_CALL_END = TagSet("<|call|>", "<|end|>", "<|return|>", _START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_NAME = re.compile(r"[\w\-]+")


def read(reader: TextReader, writer: EventWriter) -> Steps[None]:
    """Read messages to the end. The prompt contains the start of the first header."""
    pending = PendingText()
    yield from reader.space(pending)
    header = yield from reader.next_is(_FIRST, pending)
    if header is None:  # the model does not write messages
        pending.send_to(writer.content)
        header = yield from reader.until(_BEGIN, writer.content)
    while header is not None:
        channel, recipient, is_complete = yield from _read_header(reader, header)
        if not is_complete:
            return
        header = yield from _read_body(reader, writer, channel, recipient)


def _read_header(reader: TextReader, first: str) -> Steps[tuple[str, str, bool]]:
    """Read the header of the next message that has a text. Return channel, recipient, and whether a text follows."""
    pieces = [first]
    while pieces[-1] != _MESSAGE:
        tag = yield from reader.until(_HEADER, pieces.append)
        if tag is None:
            return "", "", False
        if tag in (_START, "<|end|>", "<|call|>", "<|return|>"):
            pieces = []
        pieces.append(tag)
    header = "".join(pieces)
    _, _, behind = header.rpartition(_CHANNEL)
    channel = _NAME.match(behind.strip())
    recipient = _RECIPIENT.search(header)
    return channel[0] if channel else "", recipient[1] if recipient else "", True


def _read_body(reader: TextReader, writer: EventWriter, channel: str, recipient: str) -> Steps[str | None]:
    """Read a message. Return the tag after it; None at the end of the text."""
    writer.trim()
    if recipient in writer.tools:
        writer.begin_call(recipient)
        if (yield from reader.space()) == "{":
            yield from read_arguments(reader, writer)
            return (yield from reader.until(_CALL_END, drop))
        tag = yield from reader.until(_CALL_END, writer.arguments)
        if tag is not None:
            writer.end_call()
        return tag
    sink: Sink = writer.reasoning if channel == "analysis" and not recipient else writer.content
    return (yield from reader.until(_CALL_END if recipient else _TEXT_END, sink))
