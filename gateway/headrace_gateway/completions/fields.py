"""`POST /v1/completions`: check its body and make the requests from it, one per prompt."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from headrace_broker import GenerateRequest, InvalidRequestError
from headrace_gateway.requests import call_fields, field_tables
from headrace_gateway.requests.call import Call, CompletionOptions
from headrace_gateway.requests.call_fields import boolean, checked
from headrace_gateway.requests.field_rules import COMPLETION_RULES
from headrace_gateway.requests.problems import Problems, root_of
from headrace_wire.values import shown

DEFAULT_MAX_TOKENS: Final = 16
MAX_PROMPTS: Final = 128
MAX_CHOICES: Final = 1024
"""Choices of one request, over all its prompts."""
MAX_REPEATED_BYTES: Final = 8 * 2**20
"""Limit for the copies of the sampling parameters. Each prompt becomes a request in the queue with its own copy."""


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
    logprobs = checked(given, "logprobs", problems, COMPLETION_RULES["logprobs"])
    max_tokens = checked(given, "max_tokens", problems, COMPLETION_RULES["max_tokens"])
    drop_generated = max_tokens == 0
    sampling["max_tokens"] = 1 if drop_generated else DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    _check_refused(given, problems)
    prompts = _prompts(given.get("prompt"), problems)
    asked_prompt_logprobs = "prompt_logprobs" in sampling
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    if echo and (logprobs is not None or any("prompt_token_ids" in prompt for prompt in prompts)):
        sampling.setdefault("prompt_logprobs", logprobs or 0)
    prefix_key = checked(given, "prompt_cache_key", problems) or None
    requests = _checked_requests(prompts, sampling, lora, given, problems)
    options = CompletionOptions(
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
    num_choices = len(prompts) * options.n
    if num_choices > MAX_CHOICES:
        problems.add("n", f"prompts times n must be at most {MAX_CHOICES}, got {num_choices}: send several requests")
    problems.raise_any()
    return Call(given["model"], requests, options, stream, priority, prefix_key, ignored=problems.ignored)


def _check_refused(given: Mapping[str, Any], problems: Problems) -> None:
    if given.get("suffix", "") != "":
        problems.unsupported("suffix", "suffix is not supported: leave it empty or out")
    best_of = checked(given, "best_of", problems)
    if best_of is not None and best_of != given.get("n", 1):
        problems.unsupported("best_of", "best_of is not supported: leave it out, or set it equal to n")


def _prompts(prompt: Any, problems: Problems) -> list[dict[str, Any]]:
    """Return the prompt of each request: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if not isinstance(prompt, list) or not prompt:
        told = "an empty list" if prompt == [] else shown(prompt)
        problems.must("prompt", "be a string, an array of token ids, or a list of either", told)
        return []
    if all(isinstance(each, int) for each in prompt):
        return [{"prompt_token_ids": prompt}]
    if len(prompt) > MAX_PROMPTS:
        problems.add("prompt", f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(prompt)}")
        return []
    prompts: list[dict[str, Any]] = []
    for position, each in enumerate(prompt):
        if isinstance(each, str):
            prompts.append({"prompt": each})
        elif isinstance(each, list):
            prompts.append({"prompt_token_ids": each})
        else:
            where = f"prompt[{position}]"
            problems.must(where, "be a string or a list of token ids", shown(each))
    return prompts


def _checked_requests(
    prompts: list[dict[str, Any]],
    sampling: dict[str, Any],
    lora: str | None,
    given: Mapping[str, Any],
    problems: Problems,
) -> tuple[GenerateRequest, ...]:
    """Return the requests for the queue, one per prompt. Add the problems that the queue's own rules find."""
    size = len(prompts) * len(msgspec.json.encode(sampling)) if len(prompts) > 1 else 0
    if size > MAX_REPEATED_BYTES:
        message = f"prompt has {len(prompts)} prompts, and the sampling parameters are copied for each"
        problems.add("prompt", f"{message}: at most {MAX_REPEATED_BYTES} bytes in all, got {size}")
        return ()
    names = {ours: name for name, ours in field_tables.SAMPLING.items()}
    names |= {"prompt": "prompt", "max_tokens": "max_tokens", "logprobs": "logprobs"}
    if "structured_outputs" not in given:
        names["structured_outputs"] = "response_format"
    found: list[str] = []
    requests: list[GenerateRequest] = []
    for position, prompt in enumerate(prompts or [{"prompt": "none"}]):
        where = f"prompt[{position}]" if len(prompts) > 1 else "prompt"
        try:
            requests.append(GenerateRequest.parse({**prompt, "sampling_params": sampling} if position == 0 else prompt))
        except InvalidRequestError as error:
            for problem in error.problems:
                path, _, rest = problem.partition(" ")
                root = root_of(path)
                is_of_prompt = root in ("prompt", "prompt_token_ids")
                found.append(f"{where}{path.removeprefix(root)} {rest}" if is_of_prompt else problem)
    problems.of_queue(found, names)
    return tuple(replace(each, sampling_params=requests[0].sampling_params, lora=lora) for each in requests)
