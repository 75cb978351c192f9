"""What an engine can do, as it tells in its first frame: the door refuses by name what is missing here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, get_args

from headrace_engine.errors import ConfigError

ExactResume = Literal["none", "greedy", "all"]
STRUCTURED_OUTPUTS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of `StructuredOutputsParams` that ask for a form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """Everything that a request may need of an engine. What an engine does not name, it does not have.

    Raises:
        ConfigError: a value is none of those that are known.
    """

    draws: str | None = None
    """Name of the way in which tokens are drawn: equal seeds give equal draws on engines with equal names. None:
    a seed does not repeat anything."""
    exact_resume: ExactResume = "none"
    """Which requests go on behind emitted tokens exactly as if they had never been interrupted."""
    max_allowed_token_ids: int | None = None
    """This and the next four: most entries that a request may have; None is no limit."""
    max_logit_bias: int | None = None
    max_stop_token_ids: int | None = None
    max_bad_words: int | None = None
    """Token sequences, of which a word may need two."""
    max_bad_words_tokens: int | None = None
    """Tokens of all bad words together."""
    temperature_range: tuple[float, float] | None = None
    """Lowest and highest temperature above 0; None is no limit."""
    prompt_logprobs: bool = False
    structured_outputs: tuple[str, ...] = ()
    """Those of `STRUCTURED_OUTPUTS` that are served."""
    repetition_detection: bool = False
    min_tokens: bool = False
    bad_words: bool = False
    priority: bool = False
    cache_salt: bool = False
    lora: bool = False
    lora_hot_load: bool = False
    """Adapters can be loaded and removed while the engine runs."""
    logits_processors: bool = False
    stats: tuple[str, ...] = ()
    """Fields of `StepStats` that mean something; the others stay absent from /metrics."""

    def __post_init__(self) -> None:
        problems = []
        if self.exact_resume not in get_args(ExactResume):
            problems.append(f"exact_resume is {self.exact_resume!r}, allowed are {', '.join(get_args(ExactResume))}")
        unknown = sorted(set(self.structured_outputs) - set(STRUCTURED_OUTPUTS))
        if unknown:
            problems.append(f"structured_outputs holds {unknown}, allowed are {', '.join(STRUCTURED_OUTPUTS)}")
        if problems:
            raise ConfigError(f"the engine's capabilities are wrong: {'; '.join(problems)}")

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "EngineCapabilities":
        """Raises ConfigError: a name is not known here."""
        unknown = sorted(set(wire) - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(f"the engine's capabilities are wrong: {', '.join(unknown)} is not known")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in wire.items()
        }
        return cls(**values)
