"""Runs the text of one choice through the parsers, and returns what each stream entry adds."""

from collections.abc import Iterator
from typing import Final

from headrace_broker import ChunkEvent
from headrace_gateway.parsers.events import CallArguments, Content, ParserEvent, Reasoning
from headrace_gateway.parsers.registry import OutputParser, make_parser
from headrace_gateway.requests.call import ParsedOptions


class ChoiceText:
    """Parses the text of one choice.

    Args:
        prompt_tail: the end of the prompt, which shows whether the template has opened the reasoning.
    """

    def __init__(self, options: ParsedOptions, prompt_tail: str | None) -> None:
        self._parser: Final[OutputParser | None] = (
            None
            if options.tool_parser is None and options.reasoning_parser is None
            else make_parser(
                options.tool_parser,
                options.reasoning_parser,
                tools=options.tools,
                prompt_tail=prompt_tail,
                parallel=options.parallel_tool_calls,
            )
        )
        self.num_reasoning_tokens = 0
        """All tokens of an entry count if any of its text is reasoning."""

    def read(self, event: ChunkEvent) -> Iterator[ParserEvent]:
        """Yield the parser events that the entry adds. Adjacent events of one kind are merged."""
        if self._parser is None:
            if event.text:
                yield Content(event.text)
            return
        events = self._parser.feed(event.text) if event.text else []
        if event.finish_reason is not None:
            events += self._parser.finish()
        if any(isinstance(each, Reasoning) for each in events):
            self.num_reasoning_tokens += len(event.token_ids)
        yield from _joined(events)


def _joined(events: list[ParserEvent]) -> Iterator[ParserEvent]:
    """Merge adjacent events of one kind, so that an entry adds as few chunks as possible."""
    before: ParserEvent | None = None
    for event in events:
        if isinstance(before, Content) and isinstance(event, Content):
            before = Content(before.text + event.text)
        elif isinstance(before, Reasoning) and isinstance(event, Reasoning):
            before = Reasoning(before.text + event.text)
        elif isinstance(before, CallArguments) and isinstance(event, CallArguments) and before.index == event.index:
            before = CallArguments(before.index, before.json + event.json)
        else:
            if before is not None:
                yield before
            before = event
    if before is not None:
        yield before
