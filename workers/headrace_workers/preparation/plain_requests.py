"""`PlainRequests`: prepares plain requests on the event loop.

A plain request is short. It is a prompt that is no chat, with sampling parameters that are numbers or lists of stops.
Or it has the inputs of a pooling model.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from headrace_broker.content import loads
from headrace_engine.api.input_processor import InputProcessor
from headrace_engine.text.pooling_input import PoolingTokenizer
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_workers.preparation.callback_rules import CallbackRules
from headrace_workers.preparation.decision_intake import PreparedDecision
from headrace_workers.preparation.intake import Intake, Prepared
from headrace_workers.preparation.pooling_intake import PoolingIntake, PreparedInputs

AnyPrepared: TypeAlias = Prepared | PreparedInputs | PreparedDecision
"""A message of any task that is checked and tokenised."""
_MAX_BODY_BYTES: Final = 4096
_MAX_CHARS: Final = 1000
"""A tokenizer takes at most 2 ms for a prompt of this length."""
_FIELDS: Final = {"prompt", "prompt_token_ids", "sampling_params", "model", "lora"}
_LISTS: Final = ("stop", "stop_token_ids")


def intake_of(
    processor: InputProcessor,
    tokenizer: ModelTokenizer,
    served_names: Sequence[str],
    callback_rules: CallbackRules | None = None,
) -> Intake | PoolingIntake:
    """Return the intake for the kind of the processor's model."""
    pooling = processor.model_info.pooling
    if pooling is None:
        return Intake(processor, served_names, callback_rules)
    pooling_tokenizer = PoolingTokenizer(tokenizer, pooling, processor.model_info.vocab_size)
    return PoolingIntake(pooling_tokenizer, served_names, callback_rules)


class PlainRequests:
    """Prepares plain requests, which need no process.

    Args:
        intake: of generations, without logits processors, because those may take any time to check a request; or of a
            pooling model.
    """

    def __init__(self, intake: Intake | PoolingIntake) -> None:
        self._intake = intake

    def prepare(self, request_id: str, content_type: str, body: bytes | str, task_name: str) -> AnyPrepared | None:
        """Prepare a request. Returns None if it is not plain, or is invalid: a process then handles it."""
        if len(body) > _MAX_BODY_BYTES:
            return None
        try:
            decoded = loads(body, content_type)
            if isinstance(self._intake, Intake) and not _is_plain(decoded):
                return None
            return self._intake.process(request_id, decoded, task_name)
        except Exception:  # noqa: BLE001  # the process raises it again, and answers the request
            return None


def _is_plain(body: Any) -> bool:
    args, kwargs, _ = body
    if args or not kwargs.keys() <= _FIELDS:
        return False
    prompt = kwargs.get("prompt")
    if prompt is not None and not (isinstance(prompt, str) and len(prompt) <= _MAX_CHARS):
        return False
    params = kwargs.get("sampling_params") or {}
    return all(name in _LISTS or value is None or isinstance(value, int | float) for name, value in params.items())
