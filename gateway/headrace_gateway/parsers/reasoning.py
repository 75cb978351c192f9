"""Reasoning between two tags before the answer. The opening tag may stand at the end of the prompt instead."""

from dataclasses import dataclass

from headrace_gateway.parsers.event_writer import EventWriter
from headrace_gateway.parsers.text_reader import Steps, TagSet, TextReader


@dataclass(frozen=True)
class ReasoningTags:
    """Which tags open reasoning, and which one closes each."""

    closing: dict[str, str]

    def opened_by(self, prompt_tail: str | None) -> str | None:
        """Return the opening tag that the prompt ends with."""
        end = (prompt_tail or "").rstrip()
        return next((tag for tag in self.closing if end.endswith(tag)), None)


THINK = ReasoningTags({"<think>": "</think>"})
# Magistral's first templates ask for <think>, the later ones for [THINK].
MISTRAL = ReasoningTags({"[THINK]": "[/THINK]", "<think>": "</think>"})


def read_reasoning(reader: TextReader, writer: EventWriter, tags: ReasoningTags, opened: str | None) -> Steps[None]:
    """Read reasoning, if the text begins with it or the prompt opened it, up to its closing tag.

    White space around it is dropped.
    """
    space: list[str] = []
    yield from reader.space(space.append)
    again = yield from reader.next_is(TagSet(*tags.closing))
    opened = again or opened
    if opened is None:
        writer.content("".join(space))
        return
    writer.trim()
    yield from reader.until(TagSet(tags.closing[opened]), writer.reasoning)
    writer.trim()
