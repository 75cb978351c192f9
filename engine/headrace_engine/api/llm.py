"""LLM: offline generation, embedding and scoring for a list of prompts."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from headrace_engine.api.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, search_together
from headrace_engine.api.decide import decide
from headrace_engine.api.input_processor import Prompt
from headrace_engine.api.llm_engine import LLMEngine, check_engine_args, config_of
from headrace_engine.api.metrics import Metric
from headrace_engine.api.pooling_engine import PoolingEngine, open_pooling_engine, pooling_input
from headrace_engine.errors import HeadraceEngineError, InvalidRequestError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.plain_values import plain_list
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.outputs import Logprob, RequestOutput
from headrace_engine.requests.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    ScoringRequestOutput,
)
from headrace_engine.requests.pooling_params import PoolingParams
from headrace_engine.requests.sampling_params import RequestOutputKind, SamplingParams
from headrace_engine.text.chat import ChatMessage, ContentFormat
from headrace_engine.text.chat_template import read_template
from headrace_engine.vllm_names import missing_attribute, refuse_arguments
from headrace_wire.rules import Integer
from headrace_wire.values import plain

Progress = bool | Callable[..., Any]


class LLM:
    """A model, ready to complete prompts, or to embed or score texts if that is what its folder holds.

        llm = LLM("path/or/name")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

    Args:
        model: folder in Hugging Face layout, a hub name, or smollm2-135m-instruct, which is downloaded without a hub.
        chat_template: default template of `chat`: a template, or the path of its file.
        engine_args: any option of `EngineArgs`. Another engine (`engine="vllm"`) or interpreter (`engine_python`) runs
            in a child process.

    Raises:
        ModelLoadError, ConfigError: the model cannot be served with these options.
    """

    def __init__(self, model: str, *, chat_template: str | Path | None = None, **engine_args: Any) -> None:
        args = EngineArgs(model=model, **engine_args)
        self._chat_template = read_template(chat_template)
        self._model = model
        config = config_of(args)
        self._pooling = open_pooling_engine(config)
        self._engine = LLMEngine(config) if self._pooling is None else None
        self._next_id = 0

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """Create an LLM from engine options.

        Raises:
            ConfigError: the options are wrong, or are not `EngineArgs`.
        """
        check_engine_args(engine_args)
        return cls(**{field.name: getattr(engine_args, field.name) for field in fields(EngineArgs)})

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("LLM", name)

    @property
    def engine(self) -> LLMEngine:
        """The engine of a model that generates. Raises InvalidRequestError for another model."""
        if self._engine is None:
            tasks = " and ".join(self.pooling_engine.info.tasks)
            raise InvalidRequestError(f"model {self._model!r} does not generate: use {tasks}")
        return self._engine

    @property
    def pooling_engine(self) -> PoolingEngine:
        """The engine of a model that embeds or scores. Raises InvalidRequestError for another model."""
        if self._pooling is None:
            raise InvalidRequestError(
                f"model {self._model!r} generates text; it computes no embeddings or scores: its folder has no "
                "modules.json, and no encoder or classifier in config.json"
            )
        return self._pooling

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, for use step by step."""
        return self.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts. Return the outputs in the order of the prompts.

        Args:
            prompts: one prompt or a list. A prompt is text, a list of token ids, or a map with `prompt` or
                `prompt_token_ids`, and `cache_salt`.
            sampling_params: one for all prompts, or one for each. None: `get_default_sampling_params`.
            use_tqdm: whether to show a progress bar, or a function that creates one, with tqdm's arguments.
            lora_request: one adapter for all prompts, or an adapter or None for each.
            priority: one for all prompts, or one for each. The lowest number is served first, if the engine has
                `scheduling_policy="priority"`.
            tokenization_kwargs, mm_processor_kwargs: not supported.

        Raises:
            InvalidRequestError: a prompt or parameter is invalid. Nothing was computed.
            LoRAError: an adapter cannot be served. Nothing was computed.
        """
        refuse_arguments({"tokenization_kwargs": tokenization_kwargs, "mm_processor_kwargs": mm_processor_kwargs})
        items = _as_list("prompts", prompts, is_single=_is_single_prompt)
        return self._run(items, sampling_params, priority, self.engine.add_request, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them. A conversation is a list of messages with role and content.

        Takes the arguments of `generate` and the fields of `ChatOptions`. Raises the errors of both.
        """
        refuse_arguments({"tokenization_kwargs": tokenization_kwargs, "mm_processor_kwargs": mm_processor_kwargs})
        conversations = _as_list("messages", messages, is_single=lambda m: bool(m) and isinstance(m[0], Mapping))
        add = partial(
            self.engine.add_chat_request,
            chat_template=self._chat_template if chat_template is None else chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._run(conversations, sampling_params, priority, add, use_tqdm, lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in the order of the prompts.

        Args:
            prompts: as for `generate`. Token ids are taken as they are, without special tokens.
            use_tqdm: as for `generate`.
            pooling_params: for all prompts.
            lora_request, tokenization_kwargs: not supported.

        Raises:
            InvalidRequestError: a prompt or parameter is invalid, or the model does not embed. Nothing was computed.
            HeadraceEngineError: an embedding is not finite. Names the index of its prompt.
        """
        refuse_arguments({"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs})
        items = _as_list("prompts", prompts, is_single=_is_single_prompt)
        params = _pooling_params(pooling_params)
        with _progress_bar(use_tqdm, len(items), "Embedding", "text") as bar:
            return self.pooling_engine.embed([pooling_input(item) for item in items], params, bar.update)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each class for each prompt, which may also be a pair of texts: ("a", "b").

        Takes the arguments of `embed`, and raises its errors.
        """
        refuse_arguments({"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs})
        items = _as_list("prompts", prompts, is_single=_is_single_prompt)
        params = _pooling_params(pooling_params)
        with _progress_bar(use_tqdm, len(items), "Classifying", "text") as bar:
            return self.pooling_engine.classify([pooling_input(item) for item in items], params, bar.update)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair: one text of `data_1` for all of `data_2`, or one for each.

        A cross-encoder reads both texts of a pair together. A model that embeds gives the cosine of their embeddings.
        `chat_template` is not supported. Takes the other arguments of `embed`, and raises its errors.
        """
        refuse_arguments(
            {"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs, "chat_template": chat_template}
        )
        first, second = (
            _as_list(name, data, is_single=lambda _: False) for name, data in (("data_1", data_1), ("data_2", data_2))
        )
        params = _pooling_params(pooling_params)
        with _progress_bar(use_tqdm, len(second), "Scoring", "pair") as bar:
            return self.pooling_engine.score(first, second, params, bar.update)

    def decide(self, given: str | Sequence[ChatMessage], questions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Answer 1 to 400 questions about one input, which is computed once.

        Args:
            given: the input: a text, or the messages of a chat.
            questions: maps with the fields of OpenAI's decisions: `type` (predicate, choice or score), `instructions`,
                `name`, `choices` or `levels`.

        Returns:
            `answers`, one for each question, in their order, in the form of OpenAI's decisions; and `usage`:
            `input_tokens`, of the input and of each question once, and how many of them the prefix cache had before
            (`cached_tokens`).

        Raises:
            InvalidRequestError: the input or a question is invalid, with every problem. Nothing was computed.
            ContextLengthError: the input is too long with one of the questions.
        """

        def generate(prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
            return self.generate(prompts, params, use_tqdm=False) if prompts else []

        return decide(self.engine.input_processor, generate, given, questions)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of calls that give none. The option `generation_config` determines them."""
        return self.engine.get_default_sampling_params()

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most likely continuations that beam search finds for each prompt.

        Args:
            prompts: as for `generate`.
            lora_request: one adapter for all prompts.
            concurrency_limit: number of prompts searched at once. None: all.

        Raises:
            InvalidRequestError: a prompt is invalid, or `max_logprobs` of the engine is below `2 * beam_width`.
        """
        items = _as_list("prompts", prompts, is_single=_is_single_prompt)
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(f"params must be BeamSearchParams, got a {type(params).__name__}")
        limit = plain(concurrency_limit)
        if limit is not None and (problem := Integer(1, sys.maxsize).problem("concurrency_limit", limit)):
            raise InvalidRequestError(problem)
        info = self.engine.model_info
        searches = [
            BeamSearch(self.engine.tokenize(item), params, info.eos_token_ids, info.max_model_len) for item in items
        ]
        step_params = SamplingParams(
            max_tokens=1, temperature=0, logprobs=2 * params.beam_width, ignore_eos=True, detokenize=False
        )

        def extend(beams: list[list[int]]) -> list[dict[int, Logprob]]:
            prompts = [{"prompt_token_ids": tokens} for tokens in beams]
            outputs = self.generate(prompts, step_params, use_tqdm=False, lora_request=lora_request)
            return [_next_tokens(output) for output in outputs]

        size = limit or max(len(searches), 1)
        groups = [searches[start : start + size] for start in range(0, len(searches), size)]
        with _progress_bar(use_tqdm, len(groups) * params.max_tokens, "Searching", "token") as bar:
            for group in groups:
                for _ in range(params.max_tokens):
                    if not search_together(group, extend):
                        break
                    bar.update()
        results = [(search, search.result()) for search in searches]
        for search, sequences in results:
            for sequence in sequences:
                sequence.text = self.engine.tokenizer.decode(search.shown(sequence))
        return [BeamSearchOutput(sequences=sequences) for _, sequences in results]

    def get_tokenizer(self) -> Any:
        """See `LLMEngine.get_tokenizer`."""
        return self.engine.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """See `LLMEngine.get_metrics`."""
        return self.engine.get_metrics()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `LLMEngine.reset_prefix_cache`."""
        return self.engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `LLMEngine.add_lora`."""
        return self.engine.add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """See `LLMEngine.remove_lora`."""
        return self.engine.remove_lora(lora_id)

    def list_loras(self) -> set[int]:
        """See `LLMEngine.list_loras`."""
        return self.engine.list_loras()

    def pin_lora(self, lora_id: int) -> bool:
        """See `LLMEngine.pin_lora`."""
        return self.engine.pin_lora(lora_id)

    def close(self) -> None:
        """Shut down the engine."""
        for engine in (self._engine, self._pooling):
            if engine is not None:
                engine.close()

    shutdown = close

    def _run(
        self,
        items: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        add: Callable[..., str],
        use_tqdm: Progress,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        each = _one_each("sampling params", sampling_params, len(items), SamplingParams)
        default = self.get_default_sampling_params()
        params = [_final_only(default if own is None else own) for own in each]
        loras = _one_each("LoRA requests", lora_request, len(items), LoRARequest)
        priorities = _one_each("priorities", priority, len(items), int)
        order: list[str] = []
        try:
            for item, own, lora, urgency in zip(items, params, loras, priorities, strict=True):
                request_id = str(self._next_id)
                self._next_id += 1
                add(request_id, item, own, lora_request=lora, priority=urgency)
                order.append(request_id)
            return self._collect(order, use_tqdm)
        except BaseException:
            for request_id in order:
                self.engine.abort(request_id)
            raise

    def _collect(self, order: list[str], use_tqdm: Progress) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        num_tokens = 0
        with _progress_bar(use_tqdm, len(order), "Generating", "req") as bar:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if output.finished:
                        finished[output.request_id] = output
                        num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
                        elapsed = bar.format_dict["elapsed"] or 1e-9
                        bar.set_postfix_str(f"{num_tokens / elapsed:.0f} output tokens/s", refresh=False)
                        bar.update()
        return [finished[request_id] for request_id in order]


def _progress_bar(use_tqdm: Progress, total: int, desc: str, unit: str) -> Any:
    if callable(use_tqdm):
        return use_tqdm(total=total, desc=desc, unit=unit)
    return tqdm(total=total, desc=desc, unit=unit, disable=not use_tqdm)


def _is_single_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(plain(prompts[0]), int))


def _as_list(name: str, given: Any, is_single: Callable[[Any], bool]) -> list[Any]:
    given = plain_list(given)
    if not isinstance(given, str | Mapping):
        if isinstance(given, bytes | bytearray | set | frozenset) or not isinstance(given, Iterable):
            raise InvalidRequestError(f"{name} must be one or a list of them, got a {type(given).__name__}")
        if not isinstance(given, Sequence):
            given = list(given)
    return [given] if isinstance(given, str | Mapping) or is_single(given) else list(given)


def _pooling_params(given: PoolingParams | None) -> PoolingParams:
    if given is not None and not isinstance(given, PoolingParams):
        raise InvalidRequestError(f"pooling_params must be PoolingParams, got a {type(given).__name__}")
    return given or PoolingParams()


def _one_each(name: str, given: Any, count: int, kind: type) -> list[Any]:
    """Return one value for each prompt, from a single value or a list."""
    given = plain_list(plain(given))
    if given is None or isinstance(given, kind):
        return [given] * count
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise InvalidRequestError(f"{name} must be {kind.__name__}, or a list of them, got a {type(given).__name__}")
    if len(given) != count:
        raise InvalidRequestError(f"{count} prompts came with {len(given)} {name}")
    return list(given)


def _final_only(params: Any) -> Any:
    """Return the parameters with `FINAL_ONLY`: each request has one output. An invalid value is refused later."""
    if not isinstance(params, SamplingParams):
        return params
    return replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def _next_tokens(output: RequestOutput) -> dict[int, Logprob]:
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        raise HeadraceEngineError(f"a beam could not be extended: {output.error}")
    return logprobs[0]
