"""`PoolingParams`: how texts become vectors or scores. Names follow vLLM where it has them."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from headrace_engine.errors import InvalidRequestError
from headrace_engine.vllm_names import with_vllm_names
from headrace_wire.rules import Boolean, Integer, OneOf, Rule, Text
from headrace_wire.values import plain

Truncation = Literal["error", "start", "end"]
MAX_TOKENS: Final = 1 << 20

_RULES: Final[dict[str, Rule]] = {
    "dimensions": Integer(1, 1 << 16),
    "use_activation": Boolean(),
    "prompt_name": Text(),
    "prompt": Text(),
    "truncate": OneOf(get_args(Truncation)),
    "max_tokens": Integer(1, MAX_TOKENS),
    "add_special_tokens": Boolean(),
}


@with_vllm_names("PoolingParams", InvalidRequestError)
@dataclass(slots=True, kw_only=True)
class PoolingParams:
    """Raises InvalidRequestError, which names every wrong value."""

    dimensions: int | None = None
    """Keep the first numbers of an embedding. None: all."""
    use_activation: bool | None = None
    """Of an embedding: divide it by its norm. Of scores: apply the activation. None: what the model's folder says."""
    prompt_name: str | None = None
    """The prompt of the model that precedes each text. None: its default prompt, if it has one."""
    prompt: str | None = None
    """A text that precedes each text, instead of a prompt of the model."""
    truncate: Truncation = "error"
    """What happens to a text that is too long: error refuses it, start and end cut that side off."""
    max_tokens: int | None = None
    """Maximum tokens of one text, with special tokens. None: the model's limit."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to a text. Token ids are taken as they are."""

    def __post_init__(self) -> None:
        problems = []
        for name, rule in _RULES.items():
            value = plain(getattr(self, name))
            setattr(self, name, value)
            if value is not None and (problem := rule.problem(name, value)):
                problems.append(problem)
        required = ("truncate", "add_special_tokens")
        problems += [f"{name} must not be None" for name in required if getattr(self, name) is None]
        if self.prompt is not None and self.prompt_name is not None:
            problems.append("prompt and prompt_name exclude each other")
        if problems:
            raise InvalidRequestError(problems)
