"""Decisions by requests of one token each: their plan, their requests, and their answers in a library."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from headrace_engine.api.input_processor import CheckedPrompt, InputProcessor, ProcessedRequest
from headrace_engine.errors import InvalidRequestError
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.outputs import RequestOutput
from headrace_engine.requests.sampling_params import RequestOutputKind, SamplingParams
from headrace_engine.text.chat import ChatMessage
from headrace_engine.text.decision_plan import DecisionPlan, Question, answers_of, plan_of
from headrace_wire.pooling import MAX_INPUT_TOKENS
from headrace_wire.questions import decide_problems

Generate: TypeAlias = Callable[[list[Any], list[SamplingParams]], list[RequestOutput]]


def decide(
    processor: InputProcessor, generate: Generate, given: str | Sequence[ChatMessage], questions: Sequence[Question]
) -> dict[str, Any]:
    """Do what `LLM.decide` does. `generate` completes a list of prompts."""
    if problems := decide_problems({"input": given, "questions": questions}):
        raise InvalidRequestError(problems)
    plan = checked_plan(processor, given, questions)
    readings = plan.readings()
    outputs: list[RequestOutput] = []
    # The first request fills the prefix cache with the input, which the others then find there.
    for group in (readings[:1], readings[1:]):
        prompts = [{"prompt_token_ids": plan.prompt_of(reading)} for reading in group]
        outputs += generate(prompts, [_params(reading.token_ids) for reading in group])
    answers = answers_of(questions, plan, [_logprobs(output) for output in outputs])
    cached = min(outputs[0].num_cached_tokens or 0, len(plan.shared))
    return {"answers": answers, "usage": {"input_tokens": plan.num_tokens, "cached_tokens": cached}}


def checked_plan(
    processor: InputProcessor, given: str | Sequence[Mapping[str, Any]], questions: Sequence[Question]
) -> DecisionPlan:
    """Plan the answers to checked questions.

    Raises:
        ContextLengthError: the input and a question are too long together.
        InvalidRequestError: the questions have too many tokens, or the model cannot decide.
    """
    plan = plan_of(given, questions, processor.tokenizer)
    processor.check({"prompt_token_ids": plan.longest}, _params(plan.labels[0][0]))
    if plan.num_tokens > MAX_INPUT_TOKENS:
        raise InvalidRequestError(
            f"input and questions have {plan.num_tokens} tokens, at most {MAX_INPUT_TOKENS} are taken"
        )
    return plan


def decision_request(
    processor: InputProcessor,
    request_id: str,
    plan: DecisionPlan,
    priority: int,
    arrival_time: float,
    cache_salt: str,
    lora_request: LoRARequest | None,
) -> ProcessedRequest:
    """Return a request with a choice for each of `plan.readings()`, each with a prompt of its own."""
    requests = [
        processor.assemble(
            request_id,
            CheckedPrompt(None, plan.prompt_of(reading), []),
            _params(reading.token_ids),
            priority,
            arrival_time,
            cache_salt,
            lora_request,
        )
        for reading in plan.readings()
    ]
    return replace(requests[0], choices=[request.choices[0] for request in requests])


def _params(token_ids: list[int]) -> SamplingParams:
    """Return the parameters that read the log-probabilities of these tokens at one position."""
    return SamplingParams(
        max_tokens=1,
        temperature=0,
        logprob_token_ids=token_ids,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _logprobs(output: RequestOutput) -> dict[int, float]:
    entries = output.outputs[0].logprobs
    assert entries is not None
    return {token_id: found.logprob for token_id, found in entries[0].items()}
