"""The properties of a model that clients need to write chats and read answers: part of its registry entry."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """The features that a model's chat template supports."""

    exists: bool = False
    """Whether there is a chat template."""
    tools: bool = False
    """It renders tools into the prompt."""
    developer: bool = False
    """It supports the role `developer`."""
    thinking: str | None = None
    """The variable of `chat_template_kwargs` that switches reasoning on and off."""
    reasoning_effort: bool = False
    """It reads the variable `reasoning_effort`."""
    special_tags: bool = False
    """The tags of tool calls are special tokens, which output text has only if `skip_special_tokens` is false."""
    special_think_tags: bool = False
    """The same for the tags of reasoning."""

    @classmethod
    def from_wire(cls, data: object) -> Self:
        """Read a map that a worker wrote. Missing or invalid values get their defaults."""
        if not isinstance(data, Mapping):
            return cls()
        found = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        thinking = found.pop("thinking", None)
        flags = {name: value for name, value in found.items() if isinstance(value, bool)}
        return cls(**flags, thinking=thinking if isinstance(thinking, str) else None)
