"""What the writer of an answer asks of a parser."""

from typing import Protocol

from headrace_gateway.parsers.events import ParserEvent


class OutputParser(Protocol):
    """Reads the text of one choice. It keeps back only what may still become a tag."""

    def feed(self, text: str) -> list[ParserEvent]:
        """Read the next piece."""
        ...

    def finish(self) -> list[ParserEvent]:
        """Report what was kept back, as the text has ended: by itself, at max_tokens, or with an error."""
        ...
