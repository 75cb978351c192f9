"""`POST /v1/completions`: check its body and make the requests from it, one per prompt."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace_broker import GenerateRequest, InvalidRequestError, SubmitRequest
from headrace_gateway import call_fields, field_tables
from headrace_gateway.call import Call, CompletionForm
from headrace_gateway.call_fields import MAX_LOGPROBS, MAX_N, MAX_TOKENS, boolean, integer
from headrace_gateway.problems import Problems, shown

DEFAULT_MAX_TOKENS: Final = 16
MAX_PROMPTS: Final = 128
MAX_REPEATED_BYTES: Final = 8 * 2**20
"""Each prompt becomes a request of its own in the queue, with a copy of the sampling parameters."""


def read_completion(body: Mapping[str, Any], *, lora: str | None) -> Call:
    """Check the body. Raises ApiError that lists every problem.

    Args:
        lora: the adapter that the body's `model` names.
    """
    given = call_fields.without_nulls(body)
    problems = Problems()
    call_fields.check_names(given, field_tables.COMPLETION, problems)
    sampling = call_fields.sampling_of(given)
    stream, usage, continuous = call_fields.read_stream(given, problems)
    priority, tier = call_fields.read_priority(given, problems)
    call_fields.read_response_format(given, sampling, problems)
    echo = boolean(given, "echo", problems)
    logprobs = integer(given, "logprobs", 0, MAX_LOGPROBS, problems)
    max_tokens = integer(given, "max_tokens", 0, MAX_TOKENS, problems)
    drop_generated = max_tokens == 0
    if drop_generated and not echo:
        problems.add("max_tokens", "max_tokens must be at least 1, or 0 with echo: true")
    sampling["max_tokens"] = 1 if drop_generated else DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    _check_refused(given, problems)
    prompts = _prompts(given.get("prompt"), problems)
    asked_prompt_logprobs = "prompt_logprobs" in sampling
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    if echo and (logprobs is not None or any("prompt_token_ids" in prompt for prompt in prompts)):
        sampling.setdefault("prompt_logprobs", logprobs or 0)
    cache_key = call_fields.read_cache_key(given, problems)
    _check(prompts, sampling, given, problems)
    form = CompletionForm(
        n=sampling.get("n", 1),
        include_usage=usage,
        continuous_usage=continuous,
        logprobs=logprobs,
        echo=echo,
        prompts=tuple(prompt.get("prompt") for prompt in prompts) if echo else (),
        num_prompts=len(prompts),
        drop_generated=drop_generated,
        return_token_ids=boolean(given, "return_token_ids", problems),
        tokens_as_ids=boolean(given, "return_tokens_as_token_ids", problems),
        prompt_logprobs=asked_prompt_logprobs,
        service_tier=tier,
    )
    problems.raise_any()
    shared: SubmitRequest = {"sampling_params": sampling, **cache_key}
    if lora:
        shared["lora"] = lora
    return Call(given["model"], tuple({**prompt, **shared} for prompt in prompts), form, stream, priority)


def _check_refused(given: Mapping[str, Any], problems: Problems) -> None:
    if given.get("suffix", "") != "":
        problems.unsupported("suffix", "suffix is not supported: leave it empty or out")
    best_of = integer(given, "best_of", 1, MAX_N, problems)
    if best_of is not None and best_of != given.get("n", 1):
        problems.unsupported("best_of", "best_of is not supported: leave it out, or set it equal to n")


def _prompts(prompt: Any, problems: Problems) -> list[SubmitRequest]:
    """Return one request per prompt: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if not isinstance(prompt, list) or not prompt:
        message = f"prompt must be a string, an array of token ids, or an array of either, not {shown(prompt)}"
        problems.add("prompt", message if prompt != [] else "prompt must not be an empty array")
        return []
    if all(isinstance(each, int) for each in prompt):
        return [{"prompt_token_ids": prompt}]
    if len(prompt) > MAX_PROMPTS:
        problems.add("prompt", f"prompt must hold at most {MAX_PROMPTS} prompts, not {len(prompt)}")
        return []
    requests: list[SubmitRequest] = []
    for position, each in enumerate(prompt):
        if isinstance(each, str):
            requests.append({"prompt": each})
        elif isinstance(each, list):
            requests.append({"prompt_token_ids": each})
        else:
            problems.add(f"prompt[{position}]", f"prompt[{position}] must be a string or an array of token ids")
    return requests


def _check(
    prompts: list[SubmitRequest], sampling: dict[str, Any], given: Mapping[str, Any], problems: Problems
) -> None:
    """Apply the queue's own rules before anything is sent. All prompts have the same sampling parameters."""
    if len(prompts) > 1 and (size := len(prompts) * len(msgspec.json.encode(sampling))) > MAX_REPEATED_BYTES:
        message = f"prompt has {len(prompts)} prompts, and the sampling parameters are copied for each"
        problems.add("prompt", f"{message}: at most {MAX_REPEATED_BYTES} bytes in all, not {size}")
        return
    names = {ours: name for name, ours in field_tables.SAMPLING.items()}
    names |= {"max_tokens": "max_tokens", "logprobs": "logprobs"}
    if "structured_outputs" not in given:
        names["structured_outputs"] = "response_format"
    found = []
    for position, prompt in enumerate(prompts or [{"prompt": "none"}]):
        where = f"prompt[{position}]" if len(prompts) > 1 else "prompt"
        names[where] = where
        try:
            GenerateRequest.parse({**prompt, "sampling_params": sampling} if position == 0 else prompt)
        except InvalidRequestError as error:
            for problem in error.problems:
                first, _, rest = problem.partition(" ")
                found.append(f"{where} {rest}" if first in ("prompt", "prompt_token_ids") else problem)
    problems.of_queue(found, names)
