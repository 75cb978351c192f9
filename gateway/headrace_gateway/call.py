"""A checked API call: what goes into the queue, and what is needed to write its answer.

The forms are stored in the envelope, so every replica writes the same answer from the same stream entries.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from headrace_broker import SubmitRequest

ToolChoice: TypeAlias = Literal["none", "auto", "required", "named"]


class ToolForm(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None = None
    """JSON Schema. Parsers of untyped formats use it to turn text into values."""
    strict: bool = False


class ChatForm(msgspec.Struct, frozen=True, kw_only=True, tag="chat"):
    """How a chat completion is written."""

    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    """Alternatives per position; 0: only the token itself; None: no log-probabilities."""
    tool_parser: str | None = None
    """None: the text is not searched for calls."""
    reasoning_parser: str | None = None
    tools: tuple[ToolForm, ...] = ()
    """The functions that may be called. A call of any other one is content."""
    tool_choice: ToolChoice = "none"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: bool = False
    metadata: dict[str, str] | None = None
    service_tier: str | None = None


class CompletionForm(msgspec.Struct, frozen=True, kw_only=True, tag="completion"):
    """How a text completion is written. Choice index = position of the prompt * n + choice."""

    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    echo: bool = False
    prompts: tuple[str | None, ...] = ()
    """With `echo`: the prompts as sent; None for one of token ids, whose text comes from prompt_logprobs."""
    num_prompts: int = 1
    drop_generated: bool = False
    """max_tokens was 0: the one token that the engine generated is hidden."""
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: bool = False
    """The caller asked for vLLM's `prompt_logprobs`."""
    service_tier: str | None = None


class MessageForm(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """How a message of Anthropic's API is written."""

    max_tokens: int
    stop_sequences: tuple[str, ...] = ()
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tools: tuple[ToolForm, ...] = ()
    """The functions that may be called. A call of any other one is text."""
    parallel_tool_calls: bool = True
    shows_thinking: bool = False
    service_tier: str | None = None


class ResponseForm(msgspec.Struct, frozen=True, kw_only=True, tag="response"):
    """How an object of the Responses API is written."""

    config: dict[str, Any]
    """Fields of the object that are copied from the request, such as `instructions` and `tools`."""
    store: bool = True
    background: bool = False
    logprobs: int | None = None
    """Alternatives per position; 0: only the token itself; None: no log-probabilities."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tools: tuple[ToolForm, ...] = ()
    """The functions that may be called. A call of any other one is content."""
    parallel_tool_calls: bool = True
    has_summary: bool = False
    """Reasoning is written as a summary, as the caller asked."""
    tokens_as_ids: bool = False
    service_tier: str | None = None


ParsedForm: TypeAlias = ChatForm | MessageForm | ResponseForm
"""The forms whose text is searched for calls and reasoning."""
AnswerForm: TypeAlias = ParsedForm | CompletionForm


def with_usage(form: AnswerForm) -> AnswerForm:
    """Return the form of an answer that is not streamed: its last chunk reports the usage, and no other one does."""
    if isinstance(form, ChatForm | CompletionForm):
        return msgspec.structs.replace(form, include_usage=True, continuous_usage=False)
    return form


@dataclass(frozen=True, slots=True)
class Call:
    """A request whose fields are all checked.

    `submissions` has one request per prompt, with sampling parameters, model, adapter and prefix. The request id,
    tenant, priority, expiry and idempotency key are set when it is submitted.
    """

    model: str
    """The model as the caller named it: a served name or an adapter's. Answers repeat it."""
    submissions: tuple[SubmitRequest, ...]
    form: AnswerForm
    stream: bool = False
    priority: int | None = None
    """The priority in the body (`priority`, `service_tier`); None: the key's best. A header overrides it."""
    input_items: tuple[dict[str, Any], ...] = ()
    """The input items that a stored object of the Responses API keeps."""
