"""From what callers send to what the core computes: all validation that needs the model happens here.

A prompt is text, token ids or chat messages; a request becomes one `EngineCoreRequest` a choice.
"""

import hashlib
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace_engine.errors import InvalidRequestError
from headrace_engine.grammar import TokenizerDefinition
from headrace_engine.grammar_checker import GrammarChecker
from headrace_engine.logits_processor import LogitsProcessor
from headrace_engine.lora_request import LoRARequest
from headrace_engine.request import EngineCoreRequest
from headrace_engine.request_checks import RequestChecks
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.sampling_params import SamplingParams
from headrace_engine.tokenizer import ModelTokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a map with `prompt` or `prompt_token_ids`."""
ChatMessage = Mapping[str, Any]
"""`role` and `content`, as the model's chat template expects them."""


@dataclass(slots=True, kw_only=True)
class ProcessedRequest:
    """A request that passed the door."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    choices: list[EngineCoreRequest]
    """In the order of their index."""


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """What the tokenizer made of a request that passed every check."""

    text: str | None
    token_ids: list[int]
    bad_words_token_ids: list[list[int]]


class InputProcessor:
    """The door to one loaded model.

    Args:
        max_logprobs: most log-probabilities a request may ask for at one position; -1 means no limit.
        logits_processors: those of the core; they say what `extra_args` may hold.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        tokenizer: ModelTokenizer,
        *,
        max_logprobs: int = 20,
        logits_processors: Sequence[type[LogitsProcessor]] = (),
    ) -> None:
        self._model_info = model_info
        self._tokenizer = tokenizer
        self._checks = RequestChecks(model_info, max_logprobs, logits_processors)
        self._admissions = itertools.count(1)
        self._grammar_checker = GrammarChecker(self._tokenizer_definition)

    def close(self) -> None:
        """End the process that tries grammars, if there is one."""
        self._grammar_checker.close()

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
    ) -> ProcessedRequest:
        """Validate a request with a text or token prompt.

        Raises:
            ContextLengthError: the prompt leaves no room for a token.
            InvalidRequestError: anything else that is wrong with it.
        """
        text, token_ids = self.tokenize(prompt)
        return self._build(request_id, text, token_ids, params, priority, arrival_time, cache_salt, lora_request)

    def process_chat(
        self,
        request_id: str,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
    ) -> ProcessedRequest:
        """Validate a chat request; errors as `process`."""
        problems = _message_problems(messages)
        if problems:
            raise InvalidRequestError(problems)
        text, token_ids = self._tokenizer.encode_chat(messages)
        return self._build(request_id, text, token_ids, params, priority, arrival_time, cache_salt, lora_request)

    def check_grammar(self, params: SamplingParams) -> None:
        """Compile the request's grammar on trial; `process` does it, too, but may be told to wait for it in a thread.

        Raises:
            InvalidRequestError: it cannot be used.
        """
        if params.structured_outputs is not None:
            if not self._model_info.eos_token_ids:
                raise InvalidRequestError("structured_outputs: the model has no end token, which must end the output")
            self._grammar_checker.check(params.structured_outputs)

    def _tokenizer_definition(self) -> TokenizerDefinition:
        return TokenizerDefinition(
            tokenizer_json=self._tokenizer.to_json(),
            vocab_size=self._model_info.vocab_size,
            eos_token_ids=self._model_info.eos_token_ids,
        )

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, where it came as text, and its token ids."""
        if isinstance(prompt, Mapping):
            given = {name: prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None}
            if len(given) != 1 or set(prompt) - {"prompt", "prompt_token_ids"}:
                raise InvalidRequestError("a prompt map must hold exactly one of prompt and prompt_token_ids")
            (prompt,) = given.values()
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if (
            isinstance(prompt, bytes | bytearray)
            or not isinstance(prompt, Sequence)
            or not all(type(token) is int for token in prompt)
        ):
            raise InvalidRequestError("a prompt must be text or a list of token ids (integers)")
        return None, [int(token) for token in prompt]

    def _build(
        self,
        request_id: str,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        priority: int,
        arrival_time: float,
        cache_salt: str,
        lora_request: LoRARequest | None,
    ) -> ProcessedRequest:
        self._checks.check_prompt(token_ids)
        bad_words_token_ids = self._tokenize_bad_words(params.bad_words)
        self._checks.check_params(token_ids, params, bad_words_token_ids)
        self.check_grammar(params)
        checked = CheckedPrompt(text, token_ids, bad_words_token_ids)
        return self.assemble(request_id, checked, params, priority, arrival_time, cache_salt, lora_request)

    def assemble(
        self,
        request_id: str,
        prompt: "CheckedPrompt",
        params: SamplingParams,
        priority: int,
        arrival_time: float,
        cache_salt: str,
        lora_request: LoRARequest | None,
    ) -> ProcessedRequest:
        """Make the request of what was tokenised and checked, here or in another process."""
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        # Output kind and stop strings are the output processor's business and stay here; so does all other text.
        core_params = replace(params, stop=[], bad_words=[])
        # The choices share one prompt: the first reports its log-probabilities, the others may find it in the cache.
        further_params = core_params if params.prompt_logprobs is None else replace(core_params, prompt_logprobs=None)
        admission = next(self._admissions)
        choices = [
            EngineCoreRequest(
                request_id=choice_id(request_id, index, admission),
                prompt_token_ids=prompt.token_ids,
                sampling_params=further_params if index else core_params,
                seed=choice_seed(seed, index),
                eos_token_ids=self._model_info.eos_token_ids,
                priority=priority,
                arrival_time=arrival_time,
                cache_salt=cache_salt,
                bad_words_token_ids=prompt.bad_words_token_ids,
                lora_request=lora_request,
            )
            for index in range(params.n)
        ]
        return ProcessedRequest(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            params=params,
            seed=seed,
            choices=choices,
        )

    def _tokenize_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as it stands at the start of a text and behind a space, where these differ."""
        found: list[list[int]] = []
        for word in words:
            plain, spaced = (self._tokenizer.encode_plain(prefix + word.lstrip()) for prefix in ("", " "))
            if plain:
                found.append(plain)
            # Where a space is a token of its own, whatever follows it is the word that is forbidden already.
            if spaced and spaced[-len(plain) :] != plain:
                found.append(spaced)
        return found


def request_id_of(choice: str) -> str:
    """The request that a choice, named by `choice_id`, belongs to."""
    return choice.rsplit(":", 2)[0]


def choice_id(request_id: str, index: int, admission: int) -> str:
    """The core's name for one choice of a request.

    Never used twice: after an abort the same request id may come back while old news are still on their way here.
    """
    return f"{request_id}:{index}:{admission}"


def choice_seed(seed: int, index: int) -> int:
    """Choice 0 draws with the request's own seed, so n=1 and the first of n agree."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _message_problems(messages: object) -> list[str]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return ["messages must be a list with at least one message"]
    return [
        f"message {number} must be a map with the texts role and content"
        for number, message in enumerate(messages)
        if not isinstance(message, Mapping)
        or not isinstance(message.get("role"), str)
        or not isinstance(message.get("content"), str)
    ]
