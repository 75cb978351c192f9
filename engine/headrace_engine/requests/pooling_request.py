"""A request of a pooling model: inputs go to the core, and one row of numbers for each input comes back.

Imports no torch.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace_wire.pooling import PoolingTask as PoolingTask


@dataclass(slots=True, kw_only=True)
class PoolingCoreRequest:
    """The inputs of one message, as they are sent to the core. Plain data for msgpack.

    The core starts and finishes the inputs in order.
    """

    KIND: ClassVar[str] = "pool"
    """The kind in an `add` frame."""

    request_id: str
    task: PoolingTask
    inputs: list[list[int]]
    """Token ids of each input, with special tokens. Each has 1 to `PoolingInfo.max_input_tokens` tokens."""
    first: int = 0
    """Index of `inputs[0]` in the message. An earlier attempt has computed the rows of the inputs before it."""
    second_from: list[int] = field(default_factory=list)
    """For each input that is a pair, the index of the first token with type 1; 0 for a single text.

    Empty: no input is a pair.
    """
    num_prompt_tokens: int = 0
    """Number of tokens at the beginning of each input that the pooling leaves out."""
    dimensions: int | None = None
    """Length of each row, cut before the normalisation. None: the model's."""
    normalize: bool | None = None
    """Whether rows get the length 1. None: as the model's folder says."""
    activation: bool = True
    """Whether scores and classes get the model's activation. False returns logits."""
    priority: int = 0
    """The lowest number is served first."""
    tenant: str = ""
    """Tenants take turns by tokens."""
    arrival_time: float = 0.0
    """Orders requests of the same priority, in seconds. Any clock will do."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.inputs))

    def to_wire(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_wire(cls, values: dict[str, Any]) -> "PoolingCoreRequest":
        return cls(**values)
