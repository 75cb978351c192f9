"""Joins the chunks of a stream into the answer of a request that does not stream."""

from typing import Any, Final

import msgspec

from headrace_gateway.requests.call import AnswerOptions, ChatOptions, MessageOptions, ResponseOptions

Chunk = dict[str, Any]
_KEPT: Final = ("id", "created", "model", "service_tier", "system_fingerprint")


class CompleteAnswer:
    """Builds an answer chunk by chunk, without storing the chunks. Write them with the options of `with_usage`."""

    def __init__(self, options: AnswerOptions) -> None:
        self._options: Final = options
        self._is_chat: Final = isinstance(options, ChatOptions)
        self._answer: Final[Chunk] = {}
        self._choices: Final[dict[int, Chunk]] = {}
        self._inputs: Final[dict[int, str]] = {}
        """The arguments of a message's tool calls as JSON text, by the index of the content block."""

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk."""
        if isinstance(self._options, ResponseOptions):
            self._answer.update(chunk.get("response", {}))
        elif isinstance(self._options, MessageOptions):
            self._add_event(chunk)
        else:
            self._add_choices(chunk)

    def whole(self) -> Chunk:
        """Return the whole answer. Call it after the last chunk."""
        for index, text in self._inputs.items():
            self._answer["content"][index]["input"] = input_of(text)
        if isinstance(self._options, ResponseOptions | MessageOptions):
            return self._answer
        if self._is_chat:
            for choice in self._choices.values():
                message = choice["message"]
                if "tool_calls" in message and not message["content"]:
                    message["content"] = None
        self._answer["object"] = "chat.completion" if self._is_chat else "text_completion"
        self._answer["choices"] = [self._choices[index] for index in sorted(self._choices)]
        if isinstance(self._options, ChatOptions) and self._options.metadata is not None:
            self._answer["metadata"] = self._options.metadata
        return self._answer

    def _add_choices(self, chunk: Chunk) -> None:
        """Add a chunk of a chat or text completion."""
        if not self._answer:
            self._answer.update({name: chunk[name] for name in _KEPT if name in chunk})
        if "prompt_logprobs" in chunk:
            self._answer["prompt_logprobs"] = chunk["prompt_logprobs"]
        for part in chunk["choices"]:
            choice = self._choices.setdefault(part["index"], _empty(part["index"], self._is_chat))
            _add(choice, part, self._is_chat)
        if chunk.get("usage"):
            self._answer["usage"] = chunk["usage"]

    def _add_event(self, event: Chunk) -> None:
        """Add an event of a message of Anthropic's API."""
        kind = event["type"]
        if kind == "message_start":
            self._answer.update(event["message"], content=[])
        elif kind == "content_block_start":
            self._answer["content"].append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            index, delta = event["index"], event["delta"]
            if delta["type"] == "input_json_delta":
                self._inputs[index] = self._inputs.get(index, "") + delta["partial_json"]
            else:
                name = "text" if delta["type"] == "text_delta" else "thinking"
                self._answer["content"][index][name] += delta[name]
        elif kind == "message_delta":
            usage = {**self._answer["usage"], **event["usage"]}
            self._answer.update(event["delta"], usage=usage)


def _empty(index: int, is_chat: bool) -> Chunk:
    choice: Chunk = {"index": index, "logprobs": None, "finish_reason": None}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": "", "refusal": None}
    else:
        choice["text"] = ""
    return choice


def _add(choice: Chunk, part: Chunk, is_chat: bool) -> None:
    if is_chat:
        _add_delta(choice["message"], part["delta"])
    else:
        choice["text"] += part["text"]
    if part["logprobs"] is not None:
        choice["logprobs"] = _joined(choice["logprobs"], part["logprobs"])
    for name in ("finish_reason", "stop_reason", "prompt_logprobs"):
        if part.get(name) is not None:
            choice[name] = part[name]
    if "token_ids" in part:
        choice.setdefault("token_ids", []).extend(part["token_ids"])


def _add_delta(message: Chunk, delta: Chunk) -> None:
    message["content"] += delta.get("content", "")
    if "reasoning_content" in delta:
        message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            named = {"name": call["function"]["name"], "arguments": ""}
            message.setdefault("tool_calls", []).append({"id": call["id"], "type": "function", "function": named})
        message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def _joined(before: Chunk | None, more: Chunk) -> Chunk:
    """Concatenate the lists under each key."""
    if before is None:
        return {name: list(value) if value is not None else None for name, value in more.items()}
    for name, value in more.items():
        if value is not None:
            before[name].extend(value)
    return before


def input_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call. Text that is no JSON object, such as a truncated one, is wrapped in a map."""
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
