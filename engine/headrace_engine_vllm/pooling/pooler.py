"""Which folders of sentence-transformers vLLM pools as they say."""

from typing import Any, Final

from vllm.config import PoolerConfig

from headrace_engine.checkpoints.pooling_folder import PoolingSpec
from headrace_engine.checkpoints.pooling_modules import Normalize, Pooling
from headrace_engine.errors import ModelLoadError

_POOLING_TYPES: Final = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
"""sentence-transformers' name of a pooling mode -> vLLM's."""


def pooler_config(model: str, spec: PoolingSpec) -> PoolerConfig | None:
    """Return the pooling of the folder, or None for a classifier. Raises ModelLoadError if vLLM lacks it."""
    if spec.head == "classifier" and not spec.modules:
        return None
    pooling, *rest = spec.modules or (None,)
    problem = None
    if not isinstance(pooling, Pooling):
        problem = "its scores are the logits of two tokens"
    elif [type(module) for module in rest] not in ([], [Normalize]):
        problem = f"it has the module {type(rest[0]).__name__} after the pooling"
    elif len(pooling.modes) > 1 or pooling.modes[0] not in _POOLING_TYPES:
        problem = f"its pooling is {', '.join(pooling.modes)}"
    elif not pooling.include_prompt:
        problem = "its pooling leaves out the tokens of the prompt"
    if problem is not None:
        raise ModelLoadError(
            f"model {model!r} cannot be served by vLLM: {problem}, which vLLM does not compute; served are the "
            f"poolings {', '.join(_POOLING_TYPES)} and classifiers of transformers: take --engine headrace"
        )
    assert isinstance(pooling, Pooling)
    kind: Any = _POOLING_TYPES[pooling.modes[0]]
    return PoolerConfig(pooling_type=kind, use_activation=False)
