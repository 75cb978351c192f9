"""SamplingParams: the sampling parameters of a request, with vLLM's names and defaults.

The constructor checks all values and reports all problems at once. The input processor makes the checks that need the
model (vocabulary size, context length).
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import Any, TypeVar

from headrace_engine.errors import InvalidRequestError
from headrace_engine.plain_values import plain, plain_data, plain_list, shown
from headrace_engine.sampling_checks import pattern_problems, value_problems
from headrace_engine.structured_outputs_params import StructuredOutputsParams as StructuredOutputsParams
from headrace_engine.vllm_names import with_vllm_names

T = TypeVar("T")

_LONGEST_TOKEN_ID_DIGITS = 19
_PYTHONS_NUMBERS = frozenset({int, float, bool, type(None)})

# Below this temperature the float32 softmax is one-hot up to rounding, so the arg max is taken.
GREEDY_TEMPERATURE = 1e-5


class RequestOutputKind(Enum):
    """The content of each `RequestOutput` of a stream."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(slots=True, kw_only=True)
class RepetitionDetectionParams:
    """Defines when an output has fallen into a loop: it ends with a pattern of tokens that is repeated.

    Raises:
        InvalidRequestError: the three numbers are inconsistent.
    """

    max_pattern_size: int = 0
    """Maximum length of the pattern in tokens (at most 1024). 0: no detection."""
    min_pattern_size: int = 0
    """Minimum length of the pattern in tokens. 0 means 1."""
    min_count: int = 0
    """How often the pattern must occur in a row, at least 2."""

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            setattr(self, name, plain(getattr(self, name)))
        problems = pattern_problems(self)
        if problems:
            raise InvalidRequestError(problems)


@with_vllm_names("SamplingParams", InvalidRequestError)
@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Determines how the tokens of a request are chosen, and when it ends.

    Raises:
        InvalidRequestError: one or more values are out of range. The error names all of them.
    """

    n: int = 1
    """Number of independent choices generated for the prompt."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was generated at least once (-2 to 2)."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that it was generated (-2 to 2)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (above 0)."""
    temperature: float = 1.0
    """Divides the logits before a token is drawn; 0 takes the most likely token."""
    top_p: float = 1.0
    """Keeps the most likely tokens whose probabilities add up to this share (above 0 to 1)."""
    top_k: int = 0
    """Keeps this many of the most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drops tokens whose probability is below this fraction of that of the most likely token."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is in the batch. None: a random seed for the request."""
    stop: list[str] = field(default_factory=list)
    """Generation ends before the first of these strings. May be a single string."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Generation ends with the first of these tokens."""
    ignore_eos: bool = False
    """Generation goes on after an end-of-sequence token."""
    max_tokens: int | None = 16
    """Maximum number of tokens to generate. None: as many as the context allows."""
    min_tokens: int = 0
    """Number of tokens before which no end or stop token is drawn."""
    logprobs: int | None = None
    """Number of log-probabilities for each generated token, besides its own (0 to max_logprobs of the engine; -1: all).
    True means 1."""
    prompt_logprobs: int | None = None
    """The same for each prompt token except the first. They are returned with the first generated token."""
    detokenize: bool = True
    """False: return only token ids, which saves the work of detokenising."""
    skip_special_tokens: bool = True
    """Leaves special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Whether adjacent special tokens are shown with the separator of the tokenizer."""
    include_stop_str_in_output: bool = False
    """Keeps the stop string that ended the generation at the end of the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output holds: all text so far, the new text, or one output at the end."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have. May be a map."""
    stream_interval: int | None = None
    """Number of tokens of a choice in one streamed output. The first and the last token are sent at once."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens (-100 to 100). Keys may be strings of digits, as in JSON."""
    allowed_token_ids: list[int] | None = None
    """Only these tokens are generated."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that are not generated, at the start of a word or within it. May be a single text.

    The token that would complete one of them is not drawn.
    """
    repetition_detection: RepetitionDetectionParams | None = None
    """Ends a choice that has fallen into a loop, with finish reason repetition. May be a map."""
    extra_args: dict[str, Any] | None = None
    """Arguments for the logits processors of the engine, by name. Names that none of them reads are refused."""

    def __post_init__(self) -> None:
        problems = self._normalise()
        problems += self._normalise_structured_outputs()
        problems += value_problems(self)
        if problems:
            raise InvalidRequestError(problems)

    def _normalise(self) -> list[str]:
        """Convert the short forms of values to the canonical ones."""
        if not _PYTHONS_NUMBERS.issuperset(map(type, _numbers_of(self))):
            for name in _NUMBERS:
                setattr(self, name, plain(getattr(self, name)))
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        self.stop = _as_list(self.stop)
        self.stop_token_ids = _as_list(self.stop_token_ids)
        self.bad_words = _as_list(self.bad_words)
        if self.top_k == -1:
            self.top_k = 0
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _as_list(self.allowed_token_ids)
        bias: Any = self.logit_bias
        if isinstance(bias, Mapping):
            self.logit_bias = {_token_id(token_id): plain(value) for token_id, value in bias.items()}
        if self.extra_args is not None:
            self.extra_args = plain_data(self.extra_args)
        kind: object = self.output_kind
        if not isinstance(kind, RequestOutputKind):
            try:
                self.output_kind = RequestOutputKind(kind)
            except ValueError:
                self.output_kind = RequestOutputKind.CUMULATIVE
                return [f"output_kind is {shown(kind)}, allowed are cumulative, delta, final_only"]
        detection: object = self.repetition_detection
        if detection is None or isinstance(detection, RepetitionDetectionParams):
            return []
        self.repetition_detection = None
        if not isinstance(detection, Mapping):
            return ["repetition_detection must be a map of max_pattern_size, min_pattern_size and min_count"]
        known = {f.name for f in fields(RepetitionDetectionParams)}
        unknown = sorted(str(name) for name in detection if name not in known)
        if unknown:
            return [f"repetition_detection.{name} is not known" for name in unknown]
        try:
            self.repetition_detection = RepetitionDetectionParams(**detection)
        except InvalidRequestError as error:
            return error.problems
        return []

    def _normalise_structured_outputs(self) -> list[str]:
        given: object = self.structured_outputs
        if isinstance(given, Mapping):
            try:
                self.structured_outputs = StructuredOutputsParams.from_dict(given)
            except InvalidRequestError as error:
                return error.problems
        elif given is not None and not isinstance(given, StructuredOutputsParams):
            return [f"structured_outputs is a {type(given).__name__}, expected a map or StructuredOutputsParams"]
        return []

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from a plain map, such as a decoded message. Unknown names are refused."""
        if not isinstance(values, Mapping):
            raise InvalidRequestError(f"sampling parameters must be a map, not {shown(values)}")
        known = {f.name for f in fields(cls)}
        unknown = sorted(str(name)[:40] for name in values if name not in known)
        if unknown:
            raise InvalidRequestError([f"sampling parameter {name!r} is not known" for name in unknown])
        return cls(**values)

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from what `to_dict` returned in another process, which has checked the values."""
        params = _trusted(cls, values)
        params.output_kind = RequestOutputKind(values["output_kind"])
        if params.logit_bias is not None:
            params.logit_bias = {int(token_id): bias for token_id, bias in params.logit_bias.items()}
        if values["repetition_detection"] is not None:
            params.repetition_detection = _trusted(RepetitionDetectionParams, values["repetition_detection"])
        if values["structured_outputs"] is not None:
            params.structured_outputs = _trusted(StructuredOutputsParams, values["structured_outputs"])
        return params

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """Build from values. None means the default, except for `max_tokens`: as many as fit."""
        return cls(**{name: value for name, value in values.items() if value is not None or name == "max_tokens"})

    def clone(self) -> "SamplingParams":
        """Return a copy that shares no lists and maps with this one."""
        return deepcopy(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the plain map that `from_dict` and `from_wire` read. All keys are text, for JSON and msgpack."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["output_kind"] = self.output_kind.value
        if self.logit_bias is not None:
            values["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        if self.repetition_detection is not None:
            values["repetition_detection"] = asdict(self.repetition_detection)
        if self.structured_outputs is not None:
            values["structured_outputs"] = asdict(self.structured_outputs)
        return values

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


_NUMBERS = tuple(found.name for found in fields(SamplingParams) if found.type in (int, float, bool, int | None))
_numbers_of = attrgetter(*_NUMBERS)


def _trusted(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build without the checks of the constructor."""
    made = kind.__new__(kind)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def _as_list(value: Any) -> Any:
    """Convert a string, an array or None to a list. The checks refuse anything else."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else plain_list(value)


def _token_id(value: Any) -> Any:
    """Convert a token id that may be a string of digits, like the keys of JSON."""
    if isinstance(value, str) and value.isdecimal() and len(value) <= _LONGEST_TOKEN_ID_DIGITS:
        return int(value)
    return plain(value)
