"""The features that an engine supports, and the refusal of requests and options that need others. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, get_args

from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.requests.sampling_params import SamplingParams

ExactResume = Literal["none", "greedy", "all"]
STRUCTURED_OUTPUTS: Final = ("json", "regex", "choice", "grammar", "json_object")
"""The fields of `StructuredOutputsParams` that name a form of output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The features of an engine. A field that an engine does not report has its default: not supported, or no limit.

    Raises:
        ConfigError: a value is unknown.
    """

    draws: str | None = None
    """Name of the sampling algorithm. Engines with the same name draw the same tokens from the same seed.

    None: seeds do not make draws repeatable.
    """
    exact_resume: ExactResume = "none"
    """Which requests continue after an interruption with the same tokens as without it: none, greedy ones or all."""
    max_allowed_token_ids: int | None = None
    """Maximum number of entries of this parameter in a request, as in the next four fields. None: no limit."""
    max_logit_bias: int | None = None
    max_stop_token_ids: int | None = None
    max_bad_words: int | None = None
    """Counts token sequences: a word may need more than one."""
    max_bad_words_tokens: int | None = None
    """Counts the tokens of all bad words together."""
    temperature_range: tuple[float, float] | None = None
    """Lowest and highest temperature above 0. None: no limit."""
    prompt_logprobs: bool = False
    logprob_token_ids: bool = False
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
    """The fields of `StepStats` that the engine reports. /metrics omits the others. `phase_seconds.schedule` means that
    the engine reports only this phase of `phase_seconds`."""
    version: str = ""
    """Version of the package of the engine, for information. Empty if it has none."""

    def __post_init__(self) -> None:
        problems = []
        if self.exact_resume not in get_args(ExactResume):
            problems.append(
                f"exact_resume must be one of {', '.join(get_args(ExactResume))}, got {self.exact_resume!r}"
            )
        unknown = sorted(set(self.structured_outputs) - set(STRUCTURED_OUTPUTS))
        if unknown:
            problems.append(f"structured_outputs must be of {', '.join(STRUCTURED_OUTPUTS)}, got {unknown}")
        if problems:
            raise ConfigError(f"the engine's capabilities are wrong: {'; '.join(problems)}")

    @classmethod
    def of_everything(cls, *, draws: str = "any", stats: tuple[str, ...] = ()) -> "EngineCapabilities":
        """Return the capabilities of an engine that has all features and no limits."""
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


class CapabilityChecks:
    """Compares requests with the capabilities of one engine.

    Args:
        engine: name of the engine, for messages.
        eos_token_ids: the end tokens of the model. `min_tokens` suppresses them like stop tokens.
    """

    def __init__(self, engine: str, capabilities: EngineCapabilities, eos_token_ids: Sequence[int]) -> None:
        self._engine = f"the engine {engine}"
        self._capabilities = capabilities
        self._eos_token_ids = eos_token_ids

    def problems(self, params: SamplingParams, bad_words_token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Return one message for each parameter that the engine does not support, or not with this value.

        `bad_words_token_ids` are the tokenisations of `bad_words`.
        """
        return [
            *self._beyond_limits(params, bad_words_token_ids),
            *self._missing_features(params),
            *self._missing_form(params),
        ]

    def _beyond_limits(self, params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> Iterator[str]:
        limits = self._capabilities
        end_tokens = {*params.stop_token_ids, *self._eos_token_ids} if params.min_tokens > 0 else ()
        for what, count, most in (
            ("allowed_token_ids has {} entries", len(params.allowed_token_ids or ()), limits.max_allowed_token_ids),
            ("logit_bias has {} entries", len(params.logit_bias or ()), limits.max_logit_bias),
            ("stop_token_ids and end tokens are {} beside min_tokens", len(end_tokens), limits.max_stop_token_ids),
            ("bad_words makes {} token sequences", len(bad_words), limits.max_bad_words),
            ("bad_words has {} tokens", sum(map(len, bad_words)), limits.max_bad_words_tokens),
        ):
            if most is not None and count > most:
                yield f"{what.format(count)}, {self._engine} takes at most {most}"
        if limits.temperature_range is not None and not params.is_greedy:
            low, high = limits.temperature_range
            if not low <= params.temperature <= high:
                yield f"temperature must be 0, or {low:g} to {high:g}, with {self._engine}, got {params.temperature:g}"

    def _missing_features(self, params: SamplingParams) -> Iterator[str]:
        can = self._capabilities
        if params.seed is not None and not params.is_greedy and can.draws is None:
            yield f"seed is {params.seed}, but {self._engine} cannot repeat what it draws: leave it out"
        if params.prompt_logprobs is not None and not can.prompt_logprobs:
            yield f"prompt_logprobs is {params.prompt_logprobs}, which {self._engine} does not support"
        if params.logprob_token_ids is not None and not can.logprob_token_ids:
            count = len(params.logprob_token_ids)
            yield f"logprob_token_ids has {count} entries, which {self._engine} does not support"
        if params.min_tokens > 0 and not can.min_tokens:
            yield f"min_tokens is {params.min_tokens}, which {self._engine} does not support"
        if params.bad_words and not can.bad_words:
            yield f"bad_words has {len(params.bad_words)} entries, which {self._engine} does not support"
        repetition = params.repetition_detection
        if repetition is not None and repetition.max_pattern_size > 0 and not can.repetition_detection:
            size = repetition.max_pattern_size
            yield f"repetition_detection.max_pattern_size is {size}, which {self._engine} does not support"

    def _missing_form(self, params: SamplingParams) -> Iterator[str]:
        if params.structured_outputs is None:
            return
        for kind in STRUCTURED_OUTPUTS:
            if getattr(params.structured_outputs, kind, None) is None or kind in self._capabilities.structured_outputs:
                continue
            served = ", ".join(self._capabilities.structured_outputs) or "none"
            yield f"structured_outputs asks for {kind}, {self._engine} supports {served}"


def config_problems(config: EngineConfig, capabilities: EngineCapabilities) -> list[str]:
    """Return one message for each option that the engine does not support with this model on this device."""
    problems = []
    if config.lora is not None and not capabilities.lora:
        problems.append(f"enable_lora is set, but the engine {config.engine} serves no LoRA adapters here")
    elif config.lora is not None and config.lora.needs_hot_load and not capabilities.lora_hot_load:
        problems.append(
            f"lora_dir is set, but the engine {config.engine} loads no LoRA adapters while it runs: "
            "name those that it is to serve in lora_modules"
        )
    if config.model.logits_processors and not capabilities.logits_processors:
        names = ", ".join(config.model.logits_processors)
        problems.append(f"logits_processors is {names}, but the engine {config.engine} takes none of Headrace's")
    return problems
