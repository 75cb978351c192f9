"""Reasoning between two tags before the answer. The opening tag may be at the end of the prompt instead."""

from dataclasses import dataclass

from headrace_gateway.parsers.events import EventWriter
from headrace_gateway.parsers.json_call import CallReader, Found, PendingText
from headrace_gateway.parsers.text_reader import Steps, TagSet, TextReader


@dataclass(frozen=True)
class ReasoningTags:
    """The tags that open reasoning, and the closing tag of each."""

    closing: dict[str, str]

    def opened_by(self, prompt_tail: str | None) -> str | None:
        """Return the opening tag at the end of the prompt."""
        end = (prompt_tail or "").rstrip()
        return next((tag for tag in self.closing if end.endswith(tag)), None)


THINK = ReasoningTags({"<think>": "</think>", "<seed:think>": "</seed:think>"})
# Magistral's first templates ask for <think>, the later ones for [THINK].
MISTRAL = ReasoningTags({"[THINK]": "[/THINK]", "<think>": "</think>"})


def read_reasoning(
    reader: TextReader,
    writer: EventWriter,
    tags: ReasoningTags,
    prompt_tail: str | None,
    first: TagSet,
    starts: tuple[str, ...] = (),
    read_call: CallReader | None = None,
) -> Steps[None]:
    """Read reasoning up to its closing tag, if the start of the text or the end of the prompt opens it.

    White space around it is dropped.

    Args:
        first: if the text starts with one of these tags, there is no reasoning, even if the prompt has opened it.
        starts: tags after which `read_call` reads a call. A call also ends the reasoning.
    """
    space: list[str] = []
    yield from reader.space(space.append)
    opening = (yield from reader.next_is(TagSet(*tags.closing))) or tags.opened_by(prompt_tail)
    if opening is None or (yield from reader.is_at(first)):
        writer.content("".join(space))
        return
    writer.trim()
    closing = tags.closing[opening]
    ends = TagSet(closing, *starts)
    while (tag := (yield from reader.until(ends, writer.reasoning))) not in (None, closing):
        assert tag is not None and read_call is not None
        pending = PendingText(tag)
        if (yield from read_call(reader, writer, tag, pending)) is Found.CALL:
            yield from reader.space()
            yield from reader.next_is(TagSet(closing))
            break
        pending.send_to(writer.reasoning)
    writer.trim()
