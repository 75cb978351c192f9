"""A checked API call: its requests for the queue, and the options with which its answer is written.

The options are stored in the envelope, so every replica writes the same answer from the same stream entries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from headrace_broker import GenerateRequest

ToolChoice: TypeAlias = Literal["none", "auto", "required", "named"]


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None = None
    """JSON Schema. Parsers of untyped formats use it to turn text into values."""
    strict: bool = False


class ParsedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an answer whose text is searched for tool calls and reasoning."""

    tool_parser: str | None = None
    """None: the text is not searched for calls."""
    reasoning_parser: str | None = None
    tools: tuple[Function, ...] = ()
    """The functions that may be called. A call of any other function is content."""
    parallel_tool_calls: bool = True
    service_tier: str | None = None


class ChatOptions(ParsedOptions, frozen=True, kw_only=True, tag="chat"):
    """How a chat completion is written."""

    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    """Alternatives per position; 0: only the token itself; None: no log-probabilities."""
    tool_choice: ToolChoice = "none"
    include_reasoning: bool = True
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: bool = False
    metadata: dict[str, str] | None = None


class CompletionOptions(msgspec.Struct, frozen=True, kw_only=True, tag="completion"):
    """How a text completion is written. Choice index = position of the prompt * n + choice."""

    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    echo: bool = False
    prompts: tuple[str | None, ...] = ()
    """With `echo`: the prompts as sent. None for a prompt of token ids: its text comes from prompt_logprobs."""
    num_prompts: int = 1
    drop_generated: bool = False
    """max_tokens was 0: the one token that the engine generated is hidden."""
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: bool = False
    """The caller asked for vLLM's `prompt_logprobs`."""
    service_tier: str | None = None


class MessageOptions(ParsedOptions, frozen=True, kw_only=True, tag="message"):
    """How a message of Anthropic's API is written."""

    max_tokens: int
    stop_sequences: tuple[str, ...] = ()
    shows_thinking: bool = False


class ResponseOptions(ParsedOptions, frozen=True, kw_only=True, tag="response"):
    """How an object of the Responses API is written."""

    config: dict[str, Any]
    """Fields of the object that are copied from the request, such as `instructions` and `tools`."""
    store: bool = True
    background: bool = False
    logprobs: int | None = None
    """Alternatives per position; 0: only the token itself; None: no log-probabilities."""
    has_summary: bool = False
    """Reasoning is written as a summary, as the caller asked."""
    tokens_as_ids: bool = False


AnswerOptions: TypeAlias = ChatOptions | CompletionOptions | MessageOptions | ResponseOptions


def with_usage(options: AnswerOptions) -> AnswerOptions:
    """Return the options of an answer that is not streamed: only its last chunk reports the usage."""
    if isinstance(options, ChatOptions | CompletionOptions):
        return msgspec.structs.replace(options, include_usage=True, continuous_usage=False)
    return options


@dataclass(frozen=True, slots=True)
class Call:
    """A request whose fields are all checked."""

    model: str
    """The model as the caller named it: a served name or an adapter's. Answers repeat it."""
    requests: tuple[GenerateRequest, ...]
    """One checked request per prompt, with the adapter. Submitting them does not check them again."""
    options: AnswerOptions
    stream: bool = False
    priority: int | None = None
    """The priority in the body (`priority`, `service_tier`); None: the key's `best_priority`. A header overrides it."""
    prefix_key: str | None = None
    """Requests with the same key prefer the worker that has their prefix cached."""
    window: int | None = None
    """Seconds within which the answer should be complete; None: as soon as possible."""
    input_items: tuple[dict[str, Any], ...] = ()
    """The input items that a stored object of the Responses API keeps."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """See `Problems.ignored`."""

    @property
    def num_choices(self) -> int:
        """Number of choices of all prompts."""
        return sum(request.sampling_params.get("n", 1) for request in self.requests)
