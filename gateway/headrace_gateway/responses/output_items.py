"""The output items of a response while they are written, and their events."""

from abc import ABC, abstractmethod
from typing import Any, Final

from headrace_gateway.answers.envelope import item_id

Chunk = dict[str, Any]


class Item(ABC):
    """An open item. Subclasses make the events of their kind; this class adds `output_index` and `item_id`."""

    prefix = ""

    def __init__(self, response_id: str, place: int) -> None:
        self.place: Final = place
        self.id: Final = item_id(self.prefix, response_id, place)

    def opened(self) -> list[Chunk]:
        """Return the events that open the item."""
        added = {"type": "response.output_item.added", "output_index": self.place, "item": self.shape()}
        return [added, *self._part_opened()]

    def closed(self, status: str) -> list[Chunk]:
        """Return the events that close the item. `status` is completed or incomplete."""
        done = {"type": "response.output_item.done", "output_index": self.place, "item": self.shape(status)}
        return [*self._part_closed(), done]

    def _event(self, kind: str, **fields: Any) -> Chunk:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.place, **fields}

    @abstractmethod
    def shape(self, status: str = "in_progress") -> Chunk:
        """Return the item as written so far, with this status."""

    def _part_opened(self) -> list[Chunk]:
        return []

    @abstractmethod
    def _part_closed(self) -> list[Chunk]:
        """Return the events that close the part of the item."""


class MessageItem(Item):
    """Text of the answer."""

    prefix = "msg"

    def __init__(self, response_id: str, place: int) -> None:
        super().__init__(response_id, place)
        self._texts: Final[list[str]] = []
        self._logprobs: Final[list[Chunk]] = []

    def add(self, text: str, logprobs: list[Chunk]) -> Chunk:
        """Return the event for more text."""
        self._texts.append(text)
        self._logprobs.extend(logprobs)
        return self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _part(self) -> Chunk:
        return {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": [*self._logprobs]}

    def shape(self, status: str = "in_progress") -> Chunk:
        content = [self._part()] if self._texts or status != "in_progress" else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part_opened(self) -> list[Chunk]:
        return [self._event("content_part.added", content_index=0, part=self._part())]

    def _part_closed(self) -> list[Chunk]:
        part = self._part()
        text, logprobs = part["text"], part["logprobs"]
        return [
            self._event("output_text.done", content_index=0, text=text, logprobs=logprobs),
            self._event("content_part.done", content_index=0, part=part),
        ]


class ReasoningItem(Item):
    """Text that the model produced as reasoning: written as content, or as a summary."""

    prefix = "rs"

    def __init__(self, response_id: str, place: int, *, is_summary: bool) -> None:
        super().__init__(response_id, place)
        self._is_summary: Final = is_summary
        self._texts: Final[list[str]] = []
        self._text_kind: Final = "reasoning_summary_text" if is_summary else "reasoning_text"
        self._part_kind: Final = "reasoning_summary_part" if is_summary else "content_part"
        self._index: Final = {"summary_index" if is_summary else "content_index": 0}

    def add(self, text: str) -> Chunk:
        """Return the event for more text."""
        self._texts.append(text)
        return self._event(f"{self._text_kind}.delta", **self._index, delta=text)

    def _part(self) -> Chunk:
        return {"type": "summary_text" if self._is_summary else "reasoning_text", "text": "".join(self._texts)}

    def shape(self, status: str = "in_progress") -> Chunk:
        parts = [self._part()] if self._texts else []
        shape: Chunk = {"id": self.id, "type": "reasoning", "status": status}
        if self._is_summary:
            return {**shape, "summary": parts}
        return {**shape, "summary": [], "content": parts}

    def _part_opened(self) -> list[Chunk]:
        return [self._event(f"{self._part_kind}.added", **self._index, part=self._part())]

    def _part_closed(self) -> list[Chunk]:
        part = self._part()
        return [
            self._event(f"{self._text_kind}.done", **self._index, text=part["text"]),
            self._event(f"{self._part_kind}.done", **self._index, part=part),
        ]


class CallItem(Item):
    """A function call."""

    prefix = "fc"

    def __init__(self, response_id: str, place: int, *, call_id: str, name: str) -> None:
        super().__init__(response_id, place)
        self._call_id: Final = call_id
        self._name: Final = name
        self._arguments: Final[list[str]] = []

    def add(self, arguments: str) -> Chunk:
        """Return the event for more arguments."""
        self._arguments.append(arguments)
        return self._event("function_call_arguments.delta", delta=arguments)

    def shape(self, status: str = "in_progress") -> Chunk:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }

    def _part_closed(self) -> list[Chunk]:
        done = self._event("function_call_arguments.done", name=self._name, arguments="".join(self._arguments))
        return [done]
