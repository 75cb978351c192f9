"""`POST /v1/completions`: what its body may say, and the requests that come of it, one a prompt."""

from collections.abc import Mapping
from typing import Any, Final

from headrace_broker import GenerateRequest, InvalidRequestError, SubmitRequest
from headrace_gateway import call_fields, field_tables
from headrace_gateway.call import Call, CompletionForm
from headrace_gateway.call_fields import MAX_LOGPROBS, MAX_TOKENS, boolean, integer
from headrace_gateway.problems import Problems, shown

DEFAULT_MAX_TOKENS: Final = 16
MAX_PROMPTS: Final = 128


def read_completion(body: Mapping[str, Any], *, lora: str | None) -> Call:
    """Check the body. Raises ApiError with everything that is wrong.

    Args:
        lora: the adapter that the body's model stands for.
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
    requests = [_checked({**prompt, "sampling_params": sampling}, problems) for prompt in prompts]
    extra = call_fields.read_cache_key(given, problems)
    problems.raise_any()
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
    if lora:
        extra["lora"] = lora
    return Call(given["model"], tuple({**request, **extra} for request in requests), form, stream, priority)


def _check_refused(given: Mapping[str, Any], problems: Problems) -> None:
    if given.get("suffix"):
        problems.unsupported("suffix", "suffix is not served: the text after the prompt cannot be given")
    if "best_of" in given and given["best_of"] != given.get("n", 1):
        problems.unsupported("best_of", "best_of is not served: it must be absent or equal n")


def _prompts(prompt: Any, problems: Problems) -> list[SubmitRequest]:
    """A prompt may be text or token ids, or a list of either."""
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


def _checked(request: SubmitRequest, problems: Problems) -> SubmitRequest:
    """The queue's own rules, before anything is sent."""
    try:
        GenerateRequest.parse(request)
    except InvalidRequestError as error:
        if not problems:  # every prompt has the same sampling parameters
            names = [part if part != "prompt_token_ids" else "prompt" for part in (*field_tables.SAMPLING, "prompt")]
            problems.of_broker(error.problems, [*names, "max_tokens", "logprobs"])
    return request
