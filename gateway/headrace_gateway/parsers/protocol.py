"""The interface of a parser."""

from typing import Protocol

from headrace_gateway.parsers.events import ParserEvent


class OutputParser(Protocol):
    """Parses the text of one choice. It holds back only text that may become a tag."""

    def feed(self, text: str) -> list[ParserEvent]:
        """Parse the next piece."""
        ...

    def finish(self) -> list[ParserEvent]:
        """Emit what was held back. The text has ended: normally, at max_tokens, or with an error."""
        ...
