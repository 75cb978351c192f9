"""The features of an engine, as its first frame reports them. Requests for other features are refused."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, get_args

from headrace_engine.errors import ConfigError

ExactResume = Literal["none", "greedy", "all"]
STRUCTURED_OUTPUTS: Final = ("json", "regex", "choice", "grammar", "json_object")
"""The fields of `StructuredOutputsParams` that name a form of output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The features that a request may need. An engine lacks what it does not report.

    Raises:
        ConfigError: a value is unknown.
    """

    draws: str | None = None
    """Name of the sampling algorithm. Engines with the same name draw the same tokens from the same seed.

    None: seeds do not make draws repeatable.
    """
    exact_resume: ExactResume = "none"
    """Which requests continue after emitted tokens exactly as if they had not been interrupted."""
    max_allowed_token_ids: int | None = None
    """This and the next four: maximum number of entries in a request. None: no limit."""
    max_logit_bias: int | None = None
    max_stop_token_ids: int | None = None
    max_bad_words: int | None = None
    """Number of token sequences. A word may need two."""
    max_bad_words_tokens: int | None = None
    """Total tokens of all bad words."""
    temperature_range: tuple[float, float] | None = None
    """Lowest and highest temperature above 0. None: no limit."""
    prompt_logprobs: bool = False
    structured_outputs: tuple[str, ...] = ()
    """The supported ones of `STRUCTURED_OUTPUTS`."""
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
    """The fields of `StepStats` that the engine reports. /metrics omits the others. `phase_seconds.schedule` stands for
    that phase only."""
    version: str = ""
    """Version of the package of the engine, for information. Empty if it has none."""

    def __post_init__(self) -> None:
        problems = []
        if self.exact_resume not in get_args(ExactResume):
            problems.append(f"exact_resume is {self.exact_resume!r}, allowed are {', '.join(get_args(ExactResume))}")
        unknown = sorted(set(self.structured_outputs) - set(STRUCTURED_OUTPUTS))
        if unknown:
            problems.append(f"structured_outputs holds {unknown}, allowed are {', '.join(STRUCTURED_OUTPUTS)}")
        if problems:
            raise ConfigError(f"the engine's capabilities are wrong: {'; '.join(problems)}")

    @classmethod
    def of_everything(cls, *, draws: str = "any", stats: tuple[str, ...] = ()) -> "EngineCapabilities":
        """Return all features without limits."""
        features: dict[str, Any] = {field.name: True for field in fields(cls) if field.type is bool}
        return cls(draws=draws, exact_resume="all", structured_outputs=STRUCTURED_OUTPUTS, stats=stats, **features)

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "EngineCapabilities":
        """Build from the wire. Raises ConfigError if a name is unknown."""
        unknown = sorted(set(wire) - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(f"the engine's capabilities are wrong: {', '.join(unknown)} is not known")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in wire.items()
        }
        return cls(**values)
