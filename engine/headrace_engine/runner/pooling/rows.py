"""What every engine does with the numbers of a model's head: rows of an answer in float32, and their description."""

from collections.abc import Sequence
from typing import Any

import torch

from headrace_engine.checkpoints.pooling_folder import PoolingSpec
from headrace_engine.requests.pooling_request import PoolingCoreRequest, PoolingTask
from headrace_engine.runner.contracts import PoolingInfo
from headrace_engine.runner.pooling.vectors import activation_of, normalized


class RowFinisher:
    """Cuts and normalises embeddings, and applies the activation to scores and classes.

    Args:
        dimensions: numbers of a row of the head.
        normalizes: whether embeddings are divided by their norm unless the request says otherwise.
        is_multi_label: whether each class has a probability of its own.

    Raises:
        ModelLoadError: torch has no such activation.
    """

    def __init__(self, spec: PoolingSpec, dimensions: int, *, normalizes: bool, is_multi_label: bool) -> None:
        several = dimensions > 1
        self._normalizes = normalizes
        self._activation = activation_of(spec.activation or ("Identity" if several else "Sigmoid"))
        self._class_activation = self._activation
        if several and spec.activation in (None, "Identity"):
            self._class_activation = torch.sigmoid if is_multi_label else _softmax

    def finish(self, request: PoolingCoreRequest, rows: torch.Tensor) -> list[bytes | None]:
        """Return each row in little-endian float32. None: it has a number that is not finite.

        Args:
            rows: float32 [inputs, numbers], of some inputs of the request.
        """
        finished = self._finished(request, rows)
        finite = finished.isfinite().all(1).tolist()
        encoded = finished.numpy().astype("<f4")
        return [row.tobytes() if good else None for row, good in zip(encoded, finite, strict=True)]

    def _finished(self, request: PoolingCoreRequest, rows: torch.Tensor) -> torch.Tensor:
        if request.task == "embed":
            rows = rows[:, : request.dimensions]
            normalizes = self._normalizes if request.normalize is None else request.normalize
            return normalized(rows) if normalizes else rows
        if not request.activation:
            return rows
        return (self._class_activation if request.task == "classify" else self._activation)(rows)


def pooling_info(
    spec: PoolingSpec,
    dimensions: int,
    labels: Sequence[str],
    *,
    max_input_tokens: int,
    max_step_tokens: int,
    batch_invariant: bool,
) -> PoolingInfo:
    """Describe a model to the clients of the core."""
    tasks: tuple[PoolingTask, ...] = ("embed",)
    if spec.head == "classifier":
        tasks = ("score", "classify") if dimensions == 1 else ("classify",)
    elif spec.head == "logit_score":
        tasks = ("score",)
    return PoolingInfo(
        tasks=tasks,
        dimensions=dimensions,
        max_input_tokens=max_input_tokens,
        labels=tuple(labels),
        matryoshka_dimensions=spec.matryoshka_dimensions,
        takes_any_dimensions=spec.is_matryoshka and not spec.matryoshka_dimensions,
        prompts=dict(spec.prompts),
        default_prompt_name=spec.default_prompt_name,
        pools_prompt=spec.pools_prompt,
        renders_pairs=spec.head == "logit_score",
        max_step_tokens=max_step_tokens,
        batch_invariant=batch_invariant,
    )


def labels_of(config: Any) -> list[str]:
    """Return the names of the classes of a transformers config, in the order of the numbers."""
    return [str(label) for _, label in sorted(config.id2label.items())]


def _softmax(rows: torch.Tensor) -> torch.Tensor:
    return rows.softmax(-1)
