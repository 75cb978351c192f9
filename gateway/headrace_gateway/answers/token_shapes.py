"""Log-probabilities and token counts in the formats of OpenAI's two APIs."""

from collections.abc import Iterable
from typing import Any, Final

from headrace_broker import TokenLogprob, Usage

LOWEST: Final = -9999.0
"""Stands for minus infinity, which JSON lacks."""


def token_text(candidate: TokenLogprob, *, as_id: bool) -> str:
    """Return the token's text; if it ends inside a character, its bytes in OpenAI's notation: `bytes:\\xf0\\x9f`."""
    if as_id:
        return f"token_id:{candidate.token_id}"
    if not candidate.decoded_text and candidate.bytes:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.bytes)
    return candidate.decoded_text or ""


def chat_logprobs(tokens: Iterable[list[TokenLogprob]], *, top: int, as_ids: bool) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice.

    Args:
        tokens: one list per token, the token itself first.
        top: number of alternatives per position.
    """
    content = [
        _chat_token(candidates[0], as_ids)
        | {"top_logprobs": [_chat_token(each, as_ids) for each in most_likely(candidates, top)]}
        for candidates in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(candidate: TokenLogprob, as_id: bool) -> dict[str, Any]:
    return {
        "token": token_text(candidate, as_id=as_id),
        "logprob": max(candidate.logprob, LOWEST),
        "bytes": None if candidate.bytes is None else list(candidate.bytes),
    }


def most_likely(candidates: list[TokenLogprob], top: int) -> list[TokenLogprob]:
    """Return the candidates of rank 1 to `top`, by rank. Drop the second entry of a token that is listed twice.

    `candidates` begins with the chosen token, and lists it again if it is among the most likely.
    """
    ranked = {candidate.token_id: candidate for candidate in candidates if candidate.rank <= top}
    return sorted(ranked.values(), key=lambda candidate: candidate.rank)


class CompletionLogprobs:
    """The `logprobs` of a completion's choices. Offsets count the characters of each choice's text.

    Args:
        top: number of alternatives per position. The token itself is always added.
    """

    def __init__(self, *, top: int, as_ids: bool) -> None:
        self._top = top
        self._as_ids = as_ids
        self._offset = 0

    def add(self, tokens: Iterable[list[TokenLogprob] | None], *, first_text: str = "") -> dict[str, Any]:
        """Return the log-probabilities of the next tokens.

        Args:
            tokens: one list per token, the token itself first; None for a prompt's first token.
            first_text: the text of that first token, which no list contains.
        """
        shape: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for candidates in tokens:
            shape["text_offset"].append(self._offset)
            if candidates is None:
                text, probability, alternatives = first_text, None, None
                self._offset += len(first_text)
            else:
                chosen = candidates[0]
                text, probability = token_text(chosen, as_id=self._as_ids), max(chosen.logprob, LOWEST)
                alternatives = self._alternatives(candidates)
                self._offset += len(chosen.decoded_text or "")
            shape["tokens"].append(text)
            shape["token_logprobs"].append(probability)
            shape["top_logprobs"].append(alternatives)
        return shape

    def _alternatives(self, candidates: list[TokenLogprob]) -> dict[str, float]:
        shape: dict[str, float] = {}
        for each in (*most_likely(candidates, self._top), candidates[0]):
            text = token_text(each, as_id=self._as_ids)
            shape[text] = max(each.logprob, LOWEST, shape.get(text, LOWEST))  # two tokens may have one text
        return shape


def prompt_logprobs_shape(tokens: Iterable[list[TokenLogprob] | None]) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` in vLLM's format: a map from token id to log-probability for each position."""
    return [
        None
        if candidates is None
        else {
            str(each.token_id): {
                "logprob": max(each.logprob, LOWEST),
                "rank": each.rank,
                "decoded_token": each.decoded_text,
            }
            for each in candidates
        }
        for candidates in tokens
    ]


def usage_shape(
    prompt_tokens: int, completion_tokens: int, *, cached_tokens: int | None = None, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        shape["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if reasoning_tokens is not None:
        shape["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return shape


def final_usage(usage: Usage, *, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Return the usage at the end of one request."""
    return usage_shape(
        usage.prompt_tokens,
        usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=reasoning_tokens,
    )
