"""LLM: offline generation for a list of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tqdm.auto import tqdm

from headrace_engine.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, search_together
from headrace_engine.config import EngineArgs
from headrace_engine.errors import HeadraceEngineError, InvalidRequestError
from headrace_engine.input_processor import ChatMessage, Prompt
from headrace_engine.llm_engine import LLMEngine
from headrace_engine.lora_request import LoRARequest
from headrace_engine.outputs import Logprob, RequestOutput
from headrace_engine.sampling_params import RequestOutputKind, SamplingParams


class LLM:
    """A model, ready to complete prompts.

        llm = LLM("path/or/name")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

    Args:
        model: folder in Hugging Face layout, or a hub name.
        engine_args: any option of `EngineArgs`.

    Raises:
        ModelLoadError, ConfigError: the model cannot be served with these options.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **engine_args))
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts; outputs come in the prompts' order.

        Args:
            prompts: one prompt or a list. A prompt is text, a list of token ids, or a map with `prompt` or
                `prompt_token_ids`.
            sampling_params: one for all, or one for each prompt; None: `get_default_sampling_params`.
            lora_request: one adapter for all prompts, or for each prompt one or None.
            priority: one for all, or one for each prompt; 0 is served first, where the engine was made with
                `scheduling_policy="priority"`.

        Raises:
            InvalidRequestError: a prompt or a parameter is wrong; nothing was computed.
            LoRAError: an adapter cannot be served; nothing was computed.
        """
        items = _as_list(prompts, is_single=_is_single_prompt)
        return self._run(items, sampling_params, priority, self.engine.add_request, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; a conversation is a list of messages with role and content.

        Arguments and errors as of `generate`.
        """
        conversations = _as_list(messages, is_single=lambda m: bool(m) and isinstance(m[0], dict))
        return self._run(conversations, sampling_params, priority, self.engine.add_chat_request, use_tqdm, lora_request)

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without parameters uses: those of the option `generation_config`."""
        return self.engine.get_default_sampling_params()

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations that beam search finds, for each prompt.

        Args:
            prompts: as of `generate`.
            concurrency_limit: prompts searched at once; None means all.
            lora_request: one adapter for all prompts.

        Raises:
            InvalidRequestError: a prompt is wrong, or the engine's `max_logprobs` is below `2 * beam_width`.
        """
        items = _as_list(prompts, is_single=_is_single_prompt)
        if concurrency_limit is not None and concurrency_limit < 1:
            raise InvalidRequestError(f"concurrency_limit is {concurrency_limit}, must be at least 1")
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

        size = concurrency_limit or max(len(searches), 1)
        groups = [searches[start : start + size] for start in range(0, len(searches), size)]
        with tqdm(total=len(groups) * params.max_tokens, desc="Searching", unit="token", disable=not use_tqdm) as bar:
            for group in groups:
                for _ in range(params.max_tokens):
                    if not search_together(group, extend):
                        break
                    bar.update()
        return [self._search_output(search) for search in searches]

    def _search_output(self, search: BeamSearch) -> BeamSearchOutput:
        sequences = search.result()
        for sequence in sequences:
            sequence.text = self.engine.tokenizer.decode(search.shown(sequence))
        return BeamSearchOutput(sequences=sequences)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """As `LLMEngine.add_lora`."""
        return self.engine.add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """As `LLMEngine.remove_lora`."""
        return self.engine.remove_lora(lora_id)

    def list_loras(self) -> set[int]:
        """As `LLMEngine.list_loras`."""
        return self.engine.list_loras()

    def pin_lora(self, lora_id: int) -> bool:
        """As `LLMEngine.pin_lora`."""
        return self.engine.pin_lora(lora_id)

    def close(self) -> None:
        self.engine.close()

    def _run(
        self,
        items: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        add: Callable[..., None],
        use_tqdm: bool,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        params = _params_for(items, self.get_default_sampling_params() if sampling_params is None else sampling_params)
        loras = _loras_for(items, lora_request)
        priorities = [priority] * len(items) if isinstance(priority, int) else list(priority)
        if len(priorities) != len(items):
            raise InvalidRequestError(f"{len(items)} prompts came with {len(priorities)} priorities")
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

    def _collect(self, order: list[str], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        num_tokens = 0
        with tqdm(total=len(order), desc="Generating", unit="req", disable=not use_tqdm) as bar:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if output.finished:
                        finished[output.request_id] = output
                        num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
                        elapsed = bar.format_dict["elapsed"] or 1e-9
                        bar.set_postfix_str(f"{num_tokens / elapsed:.0f} output tokens/s", refresh=False)
                        bar.update()
        return [finished[request_id] for request_id in order]


def _is_single_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _as_list(given: Any, is_single: Callable[[Any], bool]) -> list[Any]:
    return [given] if is_single(given) else list(given)


def _params_for(items: list[Any], given: SamplingParams | Sequence[SamplingParams]) -> list[SamplingParams]:
    if isinstance(given, SamplingParams):
        params = [given] * len(items)
    else:
        params = list(given)
        if len(params) != len(items):
            raise InvalidRequestError(f"{len(items)} prompts came with {len(params)} sampling params")
    return [_final_only(own) for own in params]


def _loras_for(items: list[Any], given: LoRARequest | Sequence[LoRARequest | None] | None) -> list[LoRARequest | None]:
    if given is None or isinstance(given, LoRARequest):
        return [given] * len(items)
    if len(given) != len(items):
        raise InvalidRequestError(f"{len(items)} prompts came with {len(given)} LoRA requests")
    return list(given)


def _final_only(params: SamplingParams) -> SamplingParams:
    return replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def _next_tokens(output: RequestOutput) -> dict[int, Logprob]:
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        raise HeadraceEngineError(f"a beam could not be extended: {output.error}")
    return logprobs[0]
