"""Maps names to parsers, and chains the reasoning parser and the tool parser."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from headrace_gateway.errors import UnknownParserError
from headrace_gateway.parsers import deepseek, glm45, harmony, mistral, pythonic, qwen3_xml
from headrace_gateway.parsers.events import EventWriter, ParserEvent
from headrace_gateway.parsers.reasoning import MISTRAL, THINK, read_reasoning
from headrace_gateway.parsers.tagged_json import GRANITE, HERMES, PHI4_MINI, read_llama3
from headrace_gateway.parsers.text_reader import Steps, TagSet, TextReader
from headrace_gateway.requests.call import Function

_ReadCalls: TypeAlias = Callable[[TextReader, EventWriter], Steps[None]]

_READERS: Final[Mapping[str, _ReadCalls]] = MappingProxyType(
    {
        "hermes": HERMES.read,
        "qwen3_xml": qwen3_xml.read,
        "llama3_json": read_llama3,
        "pythonic": pythonic.read,
        "mistral": mistral.read,
        "granite": GRANITE.read,
        "deepseek_v3": deepseek.read,
        "deepseek_v31": deepseek.read,
        "glm45": glm45.read,
        "phi4_mini_json": PHI4_MINI.read,
    }
)
_REASONING: Final = MappingProxyType({"think": THINK, "mistral": MISTRAL})
# In gpt-oss, reasoning and calls are messages of one format.
HARMONY: Final = "openai"
TOOL_PARSERS: Final = frozenset({*_READERS, HARMONY})
REASONING_PARSERS: Final = frozenset({*_REASONING, HARMONY})
_NOTHING: Final = TagSet()
# The grammar of a forced choice does not know that the prompt has opened the reasoning, so the model may call at once.
_FIRST_TAGS: Final = {
    "hermes": TagSet("<tool_call>"),
    "llama3_json": TagSet("{"),
    "phi4_mini_json": TagSet("functools["),
}


def make_parser(
    tool_parser: str | None,
    reasoning_parser: str | None,
    *,
    tools: Sequence[Function],
    prompt_tail: str | None,
    parallel: bool = True,
) -> "OutputParser":
    """Make the parser of one choice.

    Args:
        tool_parser: one of TOOL_PARSERS; None: the text is not searched for calls.
        reasoning_parser: one of REASONING_PARSERS; None: the text is not searched for reasoning.
        tools: the functions that may be called. A call of any other function is content.
        prompt_tail: the end of the prompt, which shows whether the template has opened the reasoning; None: it has not.
        parallel: False: everything after the first call is dropped.

    Raises:
        UnknownParserError: a name is unknown, or the two cannot be combined.
    """
    _check(tool_parser, "tool_parser", TOOL_PARSERS)
    _check(reasoning_parser, "reasoning_parser", REASONING_PARSERS)
    if tool_parser == HARMONY and reasoning_parser not in (None, HARMONY):
        raise UnknownParserError(
            f"tool_parser {HARMONY} reads reasoning, too: reasoning_parser must be {HARMONY} or none, "
            f"got {reasoning_parser!r}"
        )
    reader, writer = TextReader(), EventWriter(tools if tool_parser else (), parallel=parallel)
    steps = _read(reader, writer, tool_parser, reasoning_parser, prompt_tail)
    return OutputParser(reader, writer, steps)


def _check(name: str | None, field: str, names: frozenset[str]) -> None:
    if name is not None and name not in names:
        raise UnknownParserError(f"{field} must be one of {', '.join(sorted(names))}, got {name!r}")


def _read(
    reader: TextReader,
    writer: EventWriter,
    tool_parser: str | None,
    reasoning_parser: str | None,
    prompt_tail: str | None,
) -> Steps[None]:
    if tool_parser == HARMONY or (tool_parser is None and reasoning_parser == HARMONY):
        yield from harmony.read(reader, writer)
        return
    # Under a grammar gpt-oss writes calls in another format, and no messages.
    if reasoning_parser is not None and reasoning_parser != HARMONY:
        tags = _REASONING[reasoning_parser]
        if tool_parser == "qwen3_xml":
            yield from read_reasoning(
                reader, writer, tags, prompt_tail, _NOTHING, qwen3_xml.STARTS, qwen3_xml.read_call
            )
        else:
            yield from read_reasoning(reader, writer, tags, prompt_tail, _FIRST_TAGS.get(tool_parser or "", _NOTHING))
    if tool_parser is not None:
        yield from _READERS[tool_parser](reader, writer)
    else:
        yield from reader.until(_NOTHING, writer.content)


class OutputParser:
    """Parses the text of one choice. It holds back only text that may become a tag."""

    def __init__(self, reader: TextReader, writer: EventWriter, steps: Steps[None]) -> None:
        self._reader = reader
        self._writer = writer
        self._steps = steps

    def feed(self, text: str) -> list[ParserEvent]:
        """Parse the next piece."""
        if text and not self._writer.is_full:
            self._reader.push(text)
            next(self._steps, None)
        return self._writer.take()

    def finish(self) -> list[ParserEvent]:
        """Emit the text that was held back. Call it once the text has ended, even at max_tokens or with an error."""
        self._reader.end()
        for _ in self._steps:
            pass
        self._writer.finish()
        return self._writer.take()
