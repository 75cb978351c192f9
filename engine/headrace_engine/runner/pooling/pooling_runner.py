"""The runner of models that embed or score: many texts at once, one row of numbers each."""

import logging
import time

import torch
from transformers import PreTrainedModel

from headrace_engine.checkpoints.checkpoint import fingerprint
from headrace_engine.checkpoints.pooling_folder import PoolingSpec, read_pooling_spec
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.contracts import ModelInfo, PoolingBatch, PoolingInfo
from headrace_engine.runner.linear.prepared_linear import LinearKind
from headrace_engine.runner.models import loading
from headrace_engine.runner.pooling import pooling_loading
from headrace_engine.runner.pooling.encoders import Encoder, OwnAttention, Positions
from headrace_engine.runner.pooling.heads import ClassifierHead, Head, LogitScoreHead
from headrace_engine.runner.pooling.packing_probe import PackingProbe
from headrace_engine.runner.pooling.placement import LoadedModel, Placement
from headrace_engine.runner.pooling.rows import RowFinisher, labels_of, pooling_info
from headrace_engine.runner.pooling.vectors import ModuleChain

logger = logging.getLogger(__name__)


class TransformersPoolingRunner:
    """Implements `PoolingRunner` in float32 or bfloat16. Everything after the hidden states is float32."""

    def __init__(self, config: EngineConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._spec: PoolingSpec
        self._encoder: Encoder
        self._head: Head
        self._finisher: RowFinisher

    @torch.inference_mode()
    def load_model(self) -> ModelInfo:
        """Raises ModelLoadError or ConfigError if the folder cannot be served with these options."""
        started = time.perf_counter()
        config = self._config.model
        spec = read_pooling_spec(config.model)
        if spec is None:
            raise ModelLoadError(f"model {config.model!r} generates text; it has no files of an embedding model")
        self._spec = spec
        hf_config = pooling_loading.read_config(config, spec)
        kind = pooling_loading.model_class(config, spec, hf_config)
        dtype = loading.resolve_dtype(config, hf_config, computes_bfloat16=self._placement.computes_bfloat16)
        attention = self._placement.own_attention(kind)
        name = None
        if attention is not None:
            name = loading.register_attention(attention.attend, is_compiled=attention.is_compiled)
        model = pooling_loading.load_pooling_model(config, kind, spec, hf_config, dtype, name)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        info = self._prepare(model, attention, hf_config)
        logger.info(
            "loaded %s: %.0f M parameters, %s, %s attention, texts computed %s, %.1f s",
            kind.__name__,
            num_parameters / 1e6,
            dtype,
            self._placement.attention,
            self._encoder.name,
            time.perf_counter() - started,
        )
        return ModelInfo(
            vocab_size=hf_config.get_text_config().vocab_size,
            max_model_len=info.max_input_tokens,
            eos_token_ids=[],
            architecture=kind.__name__,
            dtype=str(dtype).removeprefix("torch."),
            device=self._placement.device,
            attention=self._placement.attention,
            num_parameters=num_parameters,
            weights=fingerprint(spec.folder),
            pooling=info,
        )

    def _prepare(self, model: PreTrainedModel, attention: OwnAttention | None, hf_config: object) -> PoolingInfo:
        """Choose how texts are computed together, and check the results."""
        name = model.config._attn_implementation
        model.set_attn_implementation("eager")
        base = model.base_model
        positions = Positions(base)
        max_tokens = self._max_tokens(positions.max_tokens(hf_config))
        probe = PackingProbe(model, self._spec, max_tokens)
        self._head = head = self._make_head(model, self._placement.dense)
        loaded = LoadedModel(
            model=model,
            base=base,
            attention=attention,
            attention_name=name,
            positions=positions,
            max_tokens=max_tokens,
            probe=probe,
            head=head,
        )
        self._encoder = self._placement.place(loaded)
        self._check(probe, head, model)
        batch_invariant = self._placement.may_be_batch_invariant(self._encoder)
        return self._info(head, model, max_tokens, batch_invariant and probe.is_batch_invariant(self._encoder, head))

    def _make_head(self, model: PreTrainedModel, linear: LinearKind | None) -> Head:
        spec, name = self._spec, self._config.model.model
        if spec.modules:
            return ModuleChain(name, spec.modules, model.config.get_text_config().hidden_size, linear)
        if spec.head == "classifier":
            return ClassifierHead(model, linear)
        return LogitScoreHead(model, spec, linear)

    def _check(self, probe: PackingProbe, head: Head, model: PreTrainedModel) -> None:
        problem = probe.difference(self._encoder, head)
        if problem is not None:
            raise ModelLoadError(
                f"model {self._config.model.model!r} ({type(model).__name__}) cannot be served: {problem}"
            )

    def _max_tokens(self, positions: int | None) -> int:
        """Return the most tokens of one text."""
        limits = [limit for limit in (self._spec.max_seq_length, positions) if limit is not None]
        wanted, model = self._config.model.max_model_len, self._config.model.model
        if wanted is None or wanted < 1:
            if not limits:
                raise ConfigError(f"model {model!r} states no longest text: set max_model_len")
            return min(limits)
        if positions is not None and wanted > positions:
            raise ConfigError(f"max_model_len must be at most {positions}, the model's positions, got {wanted}")
        return wanted

    def _info(self, head: Head, model: PreTrainedModel, max_tokens: int, batch_invariant: bool) -> PoolingInfo:
        labels = labels_of(model.config) if isinstance(head, ClassifierHead) else []
        dimensions = head.dimensions if isinstance(head, ModuleChain) else len(labels) or 1
        self._finisher = RowFinisher(
            self._spec,
            dimensions,
            normalizes=isinstance(head, ModuleChain) and head.normalizes,
            is_multi_label=getattr(model.config, "problem_type", None) == "multi_label_classification",
        )
        return pooling_info(
            self._spec,
            dimensions,
            labels,
            max_input_tokens=max_tokens,
            max_step_tokens=self._config.scheduler.max_pooling_tokens,
            batch_invariant=batch_invariant,
        )

    @torch.inference_mode()
    def compute(self, batch: PoolingBatch) -> list[bytes | None]:
        inputs = batch.inputs()
        computed = self._head(self._encoder(inputs), inputs)
        rows = torch.split(computed, [len(indices) for _, indices in batch.requests])
        pairs = zip(batch.requests, rows, strict=True)
        return [row for (request, _), own in pairs for row in self._finisher.finish(request, own)]

    def shutdown(self) -> None:
        """Do nothing: the end of the process frees everything."""
