"""LoRARequest: the adapter of a request, with vLLM's names. Imports no torch."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace_engine.errors import InvalidRequestError
from headrace_engine.plain_values import shown
from headrace_engine.vllm_names import with_vllm_names
from headrace_wire.values import is_unicode, plain

MAX_LORA_NAME_CHARS = 200
_LARGEST_ID = 2**63 - 1


@with_vllm_names("LoRARequest", InvalidRequestError)
@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter: its name, id and folder. The engine identifies adapters by their ids.

    Raises:
        InvalidRequestError: one or more values are invalid. The error names all of them.
    """

    lora_name: str
    lora_int_id: int = 0
    """At least 1. With 0, the id is derived from the name, so that the same name means the same adapter."""
    lora_path: str = ""
    """Folder in PEFT's format. May be omitted once the adapter is loaded."""
    load_inplace: bool = field(default=False, compare=False)
    """For `add_lora`: read the folder again even if the adapter is loaded."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora_int_id", plain(self.lora_int_id))
        if isinstance(self.lora_path, os.PathLike):
            object.__setattr__(self, "lora_path", os.fspath(self.lora_path))
        problems = []
        name: object = self.lora_name
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_LORA_NAME_CHARS or not name.isprintable():
            problems.append(f"lora_name must be a printable string of 1 to {MAX_LORA_NAME_CHARS} characters")
        if type(self.lora_int_id) is not int or not 0 <= self.lora_int_id <= _LARGEST_ID:
            problems.append(f"lora_int_id must be an integer from 1 to {_LARGEST_ID}, got {shown(self.lora_int_id)}")
        path: object = self.lora_path
        if not isinstance(path, str):
            problems.append(f"lora_path must be a string, got {type(path).__name__}")
        elif not is_unicode(path):
            problems.append("lora_path is no valid Unicode")
        if problems:
            raise InvalidRequestError(problems)
        if self.lora_int_id == 0:
            object.__setattr__(self, "lora_int_id", id_of(self.lora_name))

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> "LoRARequest":
        return cls(**values)


def id_of(*parts: object) -> int:
    """Return a positive id, derived from the parts of a name. It has 48 bits, so collisions are very unlikely."""
    return 1 + int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")
