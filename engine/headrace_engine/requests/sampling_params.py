"""SamplingParams: the sampling parameters of a request, with vLLM's names and defaults.

The constructor checks all values and reports all problems at once. The input processor makes the checks that need the
model (vocabulary size, context length).
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import Any, TypeVar, get_args

from headrace_engine.errors import InvalidRequestError
from headrace_engine.plain_values import plain_list
from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams as StructuredOutputsParams
from headrace_engine.vllm_names import with_vllm_names
from headrace_wire.rules import OneOf
from headrace_wire.sampling import GREEDY_TEMPERATURE, IN_LIBRARY, contradictions, is_token_id
from headrace_wire.values import named, plain, shown

T = TypeVar("T")

_PYTHONS_NUMBERS = frozenset({int, float, bool, type(None)})


class RequestOutputKind(Enum):
    """The content of each `RequestOutput` of a stream."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(slots=True, kw_only=True)
class RepetitionDetectionParams:
    """Defines when an output counts as a loop: it ends with copies of one pattern of tokens.

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
        for name in self.__slots__:
            value = plain(getattr(self, name))
            setattr(self, name, 0 if value is None else value)
        if problem := IN_LIBRARY["repetition_detection"].problem("repetition_detection", asdict(self)):
            raise InvalidRequestError(problem)


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
    """Drops tokens whose probability is below this fraction of the probability of the most likely token."""
    seed: int | None = None
    """The same seed gives the same tokens in any batch. None: a random seed for the request."""
    stop: list[str] = field(default_factory=list)
    """Generation ends before the first of these strings. May be a single string."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Generation ends with the first of these tokens."""
    ignore_eos: bool = False
    """Generation continues after an end-of-sequence token."""
    max_tokens: int | None = 16
    """Maximum number of tokens to generate. None: as many as the context allows."""
    min_tokens: int = 0
    """Number of tokens before which no end or stop token is drawn."""
    logprobs: int | None = None
    """Number of most likely tokens to report for each generated token, besides that token itself (0 to the engine's
    max_logprobs; -1: all). True means 1."""
    logprob_token_ids: list[int] | None = None
    """Report these tokens (1 to 128) for each generated token, besides that token itself, instead of the most likely
    ones."""
    prompt_logprobs: int | None = None
    """The same as `logprobs` for each prompt token except the first. They are returned with the first generated
    token."""
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
    """Number of tokens that a streamed output of a choice collects. The first and the last token are sent at once."""
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
    """Arguments for the engine's logits processors, by name. A name that no processor reads is refused."""

    def __post_init__(self) -> None:
        problems = self._normalise()
        problems += self._normalise_maps()
        problems += self._problems()
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
        if self.logprob_token_ids is not None:
            self.logprob_token_ids = _as_list(self.logprob_token_ids)
        bias: Any = self.logit_bias
        if isinstance(bias, Mapping):
            self.logit_bias = {_token_id(token_id): plain(value) for token_id, value in bias.items()}
        if self.extra_args is not None:
            self.extra_args = plain(self.extra_args)
        kind: object = self.output_kind
        if not isinstance(kind, RequestOutputKind):
            problem = _OUTPUT_KINDS.problem("output_kind", kind)
            self.output_kind = RequestOutputKind.CUMULATIVE if problem else RequestOutputKind(kind)
            return [problem] if problem else []
        return []

    def _normalise_maps(self) -> list[str]:
        problems: list[str] = []
        detection: Any = self.repetition_detection
        if detection is not None and not isinstance(detection, RepetitionDetectionParams):
            detection = plain(detection)
            problem = IN_LIBRARY["repetition_detection"].problem("repetition_detection", detection)
            problems += [problem] if problem else []
            self.repetition_detection = None if problem else RepetitionDetectionParams(**detection)
        form: Any = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            self.structured_outputs = None
            try:
                self.structured_outputs = StructuredOutputsParams.from_dict(form)
            except InvalidRequestError as error:
                problems += error.problems
        return problems

    def _problems(self) -> list[str]:
        given = {name: getattr(self, name) for name in _CHECKED}
        found = [
            rule.problem(name, given[name])
            for name, (rule, default, may_be_none) in _CHECKED.items()
            if given[name] is not default and not (may_be_none and given[name] is None)
        ]
        return [problem for problem in found if problem] or [*contradictions(given)]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from a plain map, such as a decoded message. Unknown names are refused."""
        if not isinstance(values, Mapping):
            raise InvalidRequestError(f"sampling parameters must be a map, got {shown(values)}")
        known = {f.name for f in fields(cls)}
        unknown = [f"unknown sampling parameter {named(name)}" for name in values if name not in known]
        if unknown:
            raise InvalidRequestError(unknown)
        return cls(**values)

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from a map that `to_dict` returned in another process. That process has checked the values."""
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
        """Build from values. None means the default, except that `max_tokens` None means as many as fit."""
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
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


_OUTPUT_KINDS = OneOf(tuple(kind.value for kind in RequestOutputKind))
_CHECKED = {
    found.name: (IN_LIBRARY[found.name], found.default, type(None) in get_args(found.type))
    for found in fields(SamplingParams)
    if found.name in IN_LIBRARY and found.name not in ("repetition_detection", "structured_outputs")
}
"""Parameter -> (its rule, its default, whether it may be None). Defaults are not checked."""
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
    return int(value) if isinstance(value, str) and is_token_id(value) else plain(value)
