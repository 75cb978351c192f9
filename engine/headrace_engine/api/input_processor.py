"""Validates and tokenises requests. All validation that needs the model is here.

A prompt is text, token ids or chat messages. A request becomes one `EngineCoreRequest` for each choice.
"""

import hashlib
import itertools
import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict

from headrace_engine.api.request_checks import RequestChecks
from headrace_engine.errors import InvalidRequestError
from headrace_engine.grammar.checker import GrammarChecker
from headrace_engine.grammar.grammar import TokenizerDefinition
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.config import OWN_ENGINE
from headrace_engine.options.logits_processor import LogitsProcessor
from headrace_engine.plain_values import plain_list, shown
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.text.bad_words import tokenize_bad_words
from headrace_engine.text.chat import ChatMessage as ChatMessage
from headrace_engine.text.chat import ChatOptions, read_messages
from headrace_engine.text.tokenizer import ModelTokenizer, NoTokenizer
from headrace_wire.values import is_unicode


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Only prompts with the same salt share blocks of the prefix cache."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """The text of the ids. It is returned with the output, and not used otherwise."""
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""Text, token ids (also an array or tensor), or a map with `prompt` or `prompt_token_ids`, and `cache_salt`."""
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(slots=True, kw_only=True)
class ProcessedRequest:
    """A valid request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    choices: list[EngineCoreRequest]
    """In the order of the index of the choices."""


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A tokenised request that has passed all checks."""

    text: str | None
    token_ids: list[int]
    bad_words_token_ids: list[list[int]]


class InputProcessor:
    """Validates and tokenises requests for one loaded model.

    Args:
        max_logprobs: maximum number of log-probabilities at one position; -1 means no limit.
        logits_processors: the classes that the core uses. They determine which `extra_args` are valid.
        seed: seed for requests without a seed of their own. None: they get random seeds.
        engine: name of the engine, for messages.
        capabilities: the capabilities of the engine. None: all features without limits.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        tokenizer: ModelTokenizer,
        *,
        max_logprobs: int = 20,
        logits_processors: Sequence[type[LogitsProcessor]] = (),
        seed: int | None = None,
        engine: str = OWN_ENGINE,
        capabilities: EngineCapabilities | None = None,
    ) -> None:
        self._seed = seed
        self.model_info = self._model_info = model_info.with_end_token(tokenizer.eos_token_id)
        self.tokenizer = tokenizer
        if capabilities is None:
            capabilities = EngineCapabilities.of_everything()
        self._checks = RequestChecks(self._model_info, max_logprobs, logits_processors, engine, capabilities)
        self._admissions = itertools.count(1)
        self._grammar_checker = GrammarChecker(self._tokenizer_definition)

    def close(self) -> None:
        """End the process that checks grammars, if there is one."""
        self._grammar_checker.close()

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        lora_request: LoRARequest | None = None,
    ) -> ProcessedRequest:
        """Validate a request with a text or token prompt.

        Raises:
            ContextLengthError: the prompt leaves no room for a token.
            InvalidRequestError: the request is invalid in another way.
        """
        _check_types(params, priority, lora_request)
        text, token_ids = self.tokenize(prompt)
        cache_salt = prompt.get("cache_salt") or "" if isinstance(prompt, Mapping) else ""
        return self._build(request_id, text, token_ids, params, priority, arrival_time, cache_salt, lora_request)

    @property
    def shows_tools(self) -> bool:
        """Whether the model's chat template shows tools to the model."""
        return self.tokenizer.shows_tools

    def process_chat(
        self,
        request_id: str,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        lora_request: LoRARequest | None = None,
        chat_options: ChatOptions | None = None,
    ) -> ProcessedRequest:
        """Validate a chat request. Raises the same errors as `process`."""
        _check_types(params, priority, lora_request)
        text, token_ids = self.tokenize_chat(messages, chat_options)
        return self._build(request_id, text, token_ids, params, priority, arrival_time, "", lora_request)

    @property
    def start_ids(self) -> list[int]:
        """The token ids of an empty prompt."""
        return self.tokenizer.start_ids

    def check_grammar(self, params: SamplingParams) -> None:
        """Check the grammar of a request and cache the result. If a thread calls it first, `process` does not block.

        Raises:
            InvalidRequestError: the grammar cannot be used.
        """
        if params.structured_outputs is not None:
            if not self._model_info.eos_token_ids:
                raise InvalidRequestError("structured_outputs: the model has no end token, which must end the output")
            self._grammar_checker.check(params.structured_outputs)

    def _tokenizer_definition(self) -> TokenizerDefinition:
        return TokenizerDefinition(
            tokenizer_json=self.tokenizer.to_json(),
            vocab_size=self._model_info.vocab_size,
            eos_token_ids=self._model_info.eos_token_ids,
        )

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return the text of a prompt, if it is text, and its token ids."""
        text: object = None
        if isinstance(prompt, Mapping):
            _check_prompt_map(prompt)
            text = prompt.get("prompt")
            if text is not None and not isinstance(text, str):
                raise InvalidRequestError(f"prompt must be text, got a {type(text).__name__}")
            token_ids = prompt.get("prompt_token_ids")
            prompt = text if token_ids is None and text is not None else token_ids  # type: ignore[assignment]
        if isinstance(prompt, str):
            if not is_unicode(prompt):
                raise InvalidRequestError("the prompt must be valid Unicode, got a lone surrogate")
            return prompt, self.tokenizer.encode(prompt)
        tokens = plain_list(prompt)
        if (
            isinstance(tokens, bytes | bytearray)
            or not isinstance(tokens, Sequence)
            or not all(type(token) is int for token in tokens)
        ):
            raise InvalidRequestError("a prompt must be text or a list of token ids (integers)")
        return text if isinstance(text, str) else None, list(tokens)

    def tokenize_chat(
        self, messages: Sequence[ChatMessage], chat_options: ChatOptions | None = None
    ) -> tuple[str, list[int]]:
        """Return the prompt that the chat template makes of a conversation, and its token ids."""
        return self.tokenizer.encode_chat(read_messages(messages), chat_options)

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
        self._checks.check_features(priority, cache_salt, lora_request)
        if isinstance(self.tokenizer, NoTokenizer):
            params = replace(params, detokenize=False)
        checked = self._check(text, token_ids, params)
        return self.assemble(request_id, checked, params, priority, arrival_time, cache_salt, lora_request)

    def check(self, prompt: Prompt, params: SamplingParams) -> CheckedPrompt:
        """Tokenise and check a prompt as `process` does. Another process may then call `assemble`."""
        return self._check(*self.tokenize(prompt), params)

    def check_chat(
        self, messages: Sequence[ChatMessage], params: SamplingParams, chat_options: ChatOptions | None = None
    ) -> CheckedPrompt:
        """Do what `check` does, for a chat request."""
        return self._check(*self.tokenize_chat(messages, chat_options), params)

    def _check(self, text: str | None, token_ids: list[int], params: SamplingParams) -> CheckedPrompt:
        self._checks.check_prompt(token_ids)
        bad_words_token_ids = tokenize_bad_words(self.tokenizer, params.bad_words, self._model_info.vocab_size)
        self._checks.check_params(token_ids, params, bad_words_token_ids)
        self.check_grammar(params)
        return CheckedPrompt(text, token_ids, bad_words_token_ids)

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
        """Create the request from a tokenised and checked prompt, which may come from another process."""
        admission = next(self._admissions)
        seed = params.seed
        if seed is None:
            seed = secrets.randbits(63) if self._seed is None else choice_seed(self._seed, admission)
        # The core needs no text. The output processor, in this process, handles the stop strings.
        core_params = _changed(params, stop=[], bad_words=[])
        # All choices share one prompt. Only the first one reports its log-probabilities: the others may use the cache.
        further_params = core_params if params.prompt_logprobs is None else _changed(core_params, prompt_logprobs=None)
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


def request_of_choice(choice: str) -> str:
    """Return the request id of a choice id."""
    return choice.rsplit(":", 2)[0]


def choice_id(request_id: str, index: int, admission: int) -> str:
    """Return the id of one choice of a request in the core.

    It is unique even if a request id is used again after an abort, while outputs of the old request still arrive.
    """
    return f"{request_id}:{index}:{admission}"


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of a choice. Choice 0 has the seed of the request, so its tokens do not depend on `n`."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _changed(params: SamplingParams, **values: Any) -> SamplingParams:
    """Return a copy with other values. Unlike `replace`, it does not check all values again."""
    params = copy(params)
    for name, value in values.items():
        setattr(params, name, value)
    return params


def _check_types(params: object, priority: object, lora_request: object) -> None:
    problems = []
    if not isinstance(params, SamplingParams):
        problems.append(
            f"sampling parameters must be SamplingParams, got a {type(params).__name__}; "
            "SamplingParams.from_dict converts a map"
        )
    if type(priority) is not int or not -(2**63) <= priority < 2**63:
        problems.append(f"priority must be an integer of 64 bits, got {shown(priority)}")
    if lora_request is not None and not isinstance(lora_request, LoRARequest):
        problems.append(f"lora_request must be LoRARequest, got a {type(lora_request).__name__}")
    if problems:
        raise InvalidRequestError(problems)


def _is_empty(value: object) -> bool:
    """Whether a prompt is empty. An array has no truth value, so only its type is checked."""
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


def _check_prompt_map(prompt: Mapping[str, Any]) -> None:
    if prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
        raise InvalidRequestError("a prompt map must hold prompt or prompt_token_ids")
    for name, value in prompt.items():
        if name not in _PROMPT_KEYS and not _is_empty(value):
            raise InvalidRequestError(
                f"a prompt map must hold text or token ids only, got {str(name)[:40]!r}; "
                "images, audio, video and embeddings are not supported"
            )
    salt = prompt.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt and is_unicode(salt)):
        raise InvalidRequestError(f"cache_salt must be text that is not empty, got {shown(salt)}")
