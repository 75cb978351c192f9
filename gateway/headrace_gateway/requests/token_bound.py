"""How many tokens a request of the queue may use at most. A gateway does not tokenise, so it counts bytes."""

from typing import Final, TypeAlias

from headrace_broker import GenerateRequest
from headrace_broker.decisions import DecideRequest
from headrace_broker.pooling_messages import PoolingRequest
from headrace_gateway.requests.request_size import encoded_bytes

QueueRequest: TypeAlias = GenerateRequest | PoolingRequest | DecideRequest
_TEMPLATE_TOKENS: Final = 256
"""What a chat template and special tokens may add to the bytes of a prompt."""


def most_tokens(request: QueueRequest, context: int) -> int:
    """Return an upper bound of the request's prompt and output tokens.

    Args:
        context: the most tokens of one prompt with its output.
    """
    if isinstance(request, PoolingRequest):
        return sum(min(context, encoded_bytes(each) + _TEMPLATE_TOKENS) for each in request.inputs)
    if isinstance(request, DecideRequest):
        return len(request.questions) * min(context, encoded_bytes(request.to_kwargs()) + _TEMPLATE_TOKENS)
    params = request.sampling_params
    choices, output = params.get("n") or 1, params.get("max_tokens")
    if request.prompt_token_ids is not None:
        prompt = len(request.prompt_token_ids) + 1
    else:
        prompt = encoded_bytes(request.to_kwargs()) + _TEMPLATE_TOKENS
    return min(choices * context, prompt + choices * (context if output is None else output))
