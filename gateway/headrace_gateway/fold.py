"""Joins the chunks of a stream into the non-streaming answer."""

from collections.abc import Iterable
from typing import Any, Final

from headrace_gateway.call import AnswerForm, ChatForm, MessageForm, ResponseForm
from headrace_gateway.message_fold import fold_message

Chunk = dict[str, Any]
_KEPT: Final = ("id", "created", "model", "service_tier", "system_fingerprint")


def fold(chunks: Iterable[Chunk], form: AnswerForm) -> Chunk:
    """Join all chunks of a successful answer. They must have been written with `include_usage`."""
    if isinstance(form, MessageForm):
        return fold_message(chunks)
    joined = Fold(form)
    for chunk in chunks:
        joined.add(chunk)
    return joined.answer()


class Fold:
    """Builds the non-streaming answer chunk by chunk, without storing the chunks."""

    def __init__(self, form: AnswerForm) -> None:
        self._form: Final = form
        self._is_chat: Final = isinstance(form, ChatForm)
        self._answer: Final[Chunk] = {}
        self._choices: Final[dict[int, Chunk]] = {}

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk."""
        if isinstance(self._form, ResponseForm):
            self._answer.update(chunk.get("response", {}))
            return
        if not self._answer:
            self._answer.update({name: chunk[name] for name in _KEPT if name in chunk})
        if "prompt_logprobs" in chunk:
            self._answer["prompt_logprobs"] = chunk["prompt_logprobs"]
        for part in chunk["choices"]:
            choice = self._choices.setdefault(part["index"], _empty(part["index"], self._is_chat))
            _add(choice, part, self._is_chat)
        if chunk.get("usage"):
            self._answer["usage"] = chunk["usage"]

    def answer(self) -> Chunk:
        """Return the whole answer. Call it after the last chunk."""
        if isinstance(self._form, ResponseForm):
            return self._answer
        if self._is_chat:
            for choice in self._choices.values():
                message = choice["message"]
                if "tool_calls" in message and not message["content"]:
                    message["content"] = None
        self._answer["object"] = "chat.completion" if self._is_chat else "text_completion"
        self._answer["choices"] = [self._choices[index] for index in sorted(self._choices)]
        if isinstance(self._form, ChatForm) and self._form.metadata is not None:
            self._answer["metadata"] = self._form.metadata
        return self._answer


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
