"""`VLLMPoolingRunner`: rows of numbers from vLLM's pooling runner. `PoolingCore` decides what a step computes.

Each input is one request of vLLM. vLLM computes hidden states and pools them, or computes the logits of a classifier.
What follows is Headrace's own and float32 on each engine: the cut, the norm and the activation.
"""

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm import PoolingParams

from headrace_engine.checkpoints.pooling_folder import PoolingSpec, read_pooling_spec
from headrace_engine.checkpoints.pooling_modules import Normalize
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.options.pooling_checks import generation_options
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_engine.runner.contracts import ModelInfo, PoolingBatch
from headrace_engine.runner.pooling.rows import RowFinisher, labels_of, pooling_info
from headrace_engine_vllm import description, startup
from headrace_engine_vllm.errors import memory_errors
from headrace_engine_vllm.pooling.pooler import pooler_config

if TYPE_CHECKING:
    from headrace_engine.options.config import EngineConfig


class VLLMPoolingRunner:
    """Implements `PoolingRunner` on vLLM.

    Args:
        version: of vLLM.
    """

    def __init__(self, config: "EngineConfig", version: str) -> None:
        self._config = config
        self._version = version
        self._numbers = itertools.count()
        self._finisher: RowFinisher
        self._client: Any

    def load_model(self) -> ModelInfo:
        """Load the model.

        Raises:
            ConfigError: vLLM refuses an option, or an option does not fit a model that does not generate.
            ModelLoadError: vLLM cannot compute what the folder describes.
        """
        problems = generation_options(self._config)
        if problems:
            raise ConfigError("; ".join(problems))
        model = self._config.model.model
        spec = read_pooling_spec(model)
        assert spec is not None, "the child chooses this runner by the folder"
        self._engine = startup.create_pooling_engine(self._config, pooler_config(model, spec))
        self._client = self._engine.engine_core
        self._tasks = self._engine.get_supported_tasks()
        self._task: Any = "classify" if spec.head == "classifier" else "embed"
        if self._task not in self._tasks:
            raise ModelLoadError(
                f"model {model!r}: vLLM {self._version} computes {self._tasks} of it, not {self._task}"
            )
        return replace(description.model_info(self._engine, self._config), pooling=self._pooling_info(spec))

    def _pooling_info(self, spec: PoolingSpec) -> Any:
        config = self._engine.vllm_config.model_config
        labels = labels_of(config.hf_config) if spec.head == "classifier" else []
        dimensions = len(labels) or int(config.embedding_size)
        limits = [limit for limit in (spec.max_seq_length, config.max_model_len) if limit is not None]
        self._finisher = RowFinisher(
            spec,
            dimensions,
            normalizes=bool(spec.modules) and isinstance(spec.modules[-1], Normalize),
            is_multi_label=getattr(config.hf_config, "problem_type", None) == "multi_label_classification",
        )
        return pooling_info(
            spec,
            dimensions,
            labels,
            max_input_tokens=min(limits),
            max_step_tokens=self._engine.vllm_config.scheduler_config.max_num_batched_tokens,
            batch_invariant=False,
        )

    def compute(self, batch: PoolingBatch) -> list[bytes | None]:
        ids = [
            [self._add(request, index) for index in indices]  # in the order of the rows
            for request, indices in batch.requests
        ]
        missing, found = {vllm_id for own in ids for vllm_id in own}, {}
        while missing:
            with memory_errors():
                outputs = self._client.get_output().outputs
            for output in outputs:
                if output.pooling_output is not None:
                    found[output.request_id] = output.pooling_output
                    missing.discard(output.request_id)
        rows: list[bytes | None] = []
        for (request, _), own in zip(batch.requests, ids, strict=True):
            numbers = torch.stack([found[vllm_id] for vllm_id in own])
            rows += self._finisher.finish(request, numbers.float().cpu().flatten(1))
        return rows

    def _add(self, request: PoolingCoreRequest, index: int) -> str:
        """Queue an input in vLLM. Return vLLM's id."""
        second_from = request.second_from[index] if request.second_from else 0
        params = PoolingParams(
            task=self._task,
            use_activation=False,
            extra_kwargs={"compressed_token_type_ids": second_from} if second_from else None,
        )
        prompt: Any = {"type": "token", "prompt_token_ids": request.inputs[index]}
        theirs = self._engine.input_processor.process_inputs(
            str(next(self._numbers)), prompt, params, supported_tasks=self._tasks
        )
        self._engine.input_processor.assign_request_id(theirs)
        self._client.add_request(theirs)
        vllm_id: str = theirs.request_id
        return vllm_id

    def shutdown(self) -> None:
        self._client.shutdown()
