"""The text of one choice on its way through the parsers: what each stream entry adds to the answer."""

from collections.abc import Iterator
from typing import Final, Protocol

from headrace_broker import ChunkEvent
from headrace_gateway.call import ToolForm
from headrace_gateway.parsers.events import CallArguments, Content, ParserEvent, Reasoning
from headrace_gateway.parsers.protocol import OutputParser
from headrace_gateway.parsers.registry import make_parser


class ParsedForm(Protocol):
    """How the text of a choice is read."""

    @property
    def tool_parser(self) -> str | None:
        """None: the text holds no calls to look for."""

    @property
    def reasoning_parser(self) -> str | None:
        """None: the text holds no reasoning to look for."""

    @property
    def tools(self) -> tuple[ToolForm, ...]:
        """Those that may be called: a call of another one is content."""

    @property
    def parallel_tool_calls(self) -> bool:
        """False: at most one call."""


class ChoiceText:
    """Args:
    prompt_tail: the prompt's end, which tells whether the template has opened the reasoning.
    """

    def __init__(self, form: ParsedForm, prompt_tail: str | None) -> None:
        self._parser: Final[OutputParser | None] = (
            None
            if form.tool_parser is None and form.reasoning_parser is None
            else make_parser(
                form.tool_parser,
                form.reasoning_parser,
                tools=form.tools,
                prompt_tail=prompt_tail,
                parallel=form.parallel_tool_calls,
            )
        )
        self.num_reasoning_tokens = 0
        """Exact but for the entry in which the answer begins."""

    def read(self, event: ChunkEvent) -> Iterator[ParserEvent]:
        """What the entry adds. Neighbours of one kind are one event."""
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
    """Neighbours of one kind as one: an entry gives as few chunks as it can."""
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
