"""The message that brings texts to the pooling core, and the rows that it sends back. Plain data; imports no torch."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(slots=True, kw_only=True)
class PoolingInput:
    """The tokens of one text, or of one pair of texts."""

    token_ids: list[int]
    second_from: int = 0
    """Index of the first token of type 1, which begins the second text of a pair. 0: all tokens have type 0."""
    pooled_from: int = 0
    """Index of the first token that is pooled: 0, or the number of tokens of a prompt that the model leaves out."""

    def to_wire(self) -> list[Any]:
        return [self.token_ids, self.second_from, self.pooled_from]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> "PoolingInput":
        token_ids, second_from, pooled_from = wire
        return cls(token_ids=token_ids, second_from=second_from, pooled_from=pooled_from)


@dataclass(slots=True, kw_only=True)
class PoolingCoreRequest:
    """The texts of one message. Each becomes one row of numbers. Rows are finished in the order of the texts."""

    KIND: ClassVar[str] = "pool"
    """The kind in an `add` frame."""

    request_id: str
    inputs: list[PoolingInput]
    """The texts that are not done yet."""
    first: int = 0
    """How many texts of the message were done by an earlier attempt."""
    dimensions: int | None = None
    """Keep this many numbers of an embedding. None: all."""
    use_activation: bool | None = None
    """See `PoolingParams`."""
    priority: int = 0
    """The lowest number is served first."""

    @property
    def num_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.inputs)

    def to_wire(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        values["inputs"] = [each.to_wire() for each in self.inputs]
        return values

    @classmethod
    def from_wire(cls, values: dict[str, Any]) -> "PoolingCoreRequest":
        return cls(**{**values, "inputs": [PoolingInput.from_wire(wire) for wire in values["inputs"]]})


@dataclass(slots=True, kw_only=True)
class PooledRows:
    """The rows of a request that one step computed, or the error that ended the request."""

    request_id: str
    first: int
    """Index in the message of the text of the first row."""
    count: int
    data: bytes
    """The rows one after the other: little-endian float32."""
    finished: bool = False
    error: str | None = None
    """Why the request ended without its other rows. None: it did not."""

    def to_wire(self) -> list[Any]:
        return [self.request_id, self.first, self.count, self.data, self.finished, self.error]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> "PooledRows":
        request_id, first, count, data, finished, error = wire
        return cls(request_id=request_id, first=first, count=count, data=data, finished=finished, error=error)
