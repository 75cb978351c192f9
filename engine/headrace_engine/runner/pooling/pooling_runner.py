"""The CPU runner of models that embed or score: texts packed without padding, one row of numbers each."""

import logging
import time

import torch
from transformers import PreTrainedModel

from headrace_engine.checkpoints.checkpoint import fingerprint
from headrace_engine.checkpoints.pooling_folder import PoolingSpec, read_pooling_spec
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.attention.varlen import NativeVarlen, TorchVarlen, VarlenAttention
from headrace_engine.runner.contracts import ModelInfo, PoolingBatch, PoolingInfo
from headrace_engine.runner.linear import native_linear, packed_linear
from headrace_engine.runner.linear.native_linear import NativeLinear
from headrace_engine.runner.linear.packed_linear import PackedLinear
from headrace_engine.runner.linear.prepared_linear import LinearKind
from headrace_engine.runner.linear.replacement import pack_linear_layers, watch_weights
from headrace_engine.runner.models import loading
from headrace_engine.runner.pooling import pooling_loading
from headrace_engine.runner.pooling.encoders import Encoder, EqualLengthEncoder, PackedEncoder, Positions
from headrace_engine.runner.pooling.gelu_fusion import GeluFusion
from headrace_engine.runner.pooling.heads import ClassifierHead, Head, LogitScoreHead
from headrace_engine.runner.pooling.packing_probe import PackingProbe
from headrace_engine.runner.pooling.rows import RowFinisher, labels_of, pooling_info
from headrace_engine.runner.pooling.vectors import ModuleChain

logger = logging.getLogger(__name__)


class CPUPoolingRunner:
    """Implements `PoolingRunner` in float32 or bfloat16. Everything after the hidden states is float32."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._spec: PoolingSpec
        self._encoder: Encoder
        self._head: Head
        self._finisher: RowFinisher

    @torch.inference_mode()
    def load_model(self) -> ModelInfo:
        """Raises ModelLoadError or ConfigError if the folder cannot be served with these options."""
        started = time.perf_counter()
        pooling_loading.check_options(self._config)
        config = self._config.model
        spec = read_pooling_spec(config.model)
        if spec is None:
            raise ModelLoadError(f"model {config.model!r} generates text; it has no files of an embedding model")
        self._spec = spec
        hf_config = pooling_loading.read_config(config, spec)
        kind = pooling_loading.model_class(config, spec, hf_config)
        dtype = loading.resolve_dtype(config, hf_config, computes_bfloat16=packed_linear.computes_bfloat16())
        attention = _attention()
        packed = PackedEncoder(attention) if kind._supports_attention_backend else None
        model = pooling_loading.load_pooling_model(
            config, kind, spec, hf_config, dtype, packed.attend if packed is not None else None
        )
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        info = self._prepare(model, packed, hf_config)
        logger.info(
            "loaded %s: %.0f M parameters, %s, %s attention, texts computed %s, %.1f s",
            kind.__name__,
            num_parameters / 1e6,
            dtype,
            attention.name,
            self._encoder.name,
            time.perf_counter() - started,
        )
        return ModelInfo(
            vocab_size=hf_config.get_text_config().vocab_size,
            max_model_len=info.max_input_tokens,
            eos_token_ids=[],
            architecture=kind.__name__,
            dtype=str(dtype).removeprefix("torch."),
            device="cpu",
            attention=attention.name,
            num_parameters=num_parameters,
            weights=fingerprint(spec.folder),
            pooling=info,
        )

    def _prepare(self, model: PreTrainedModel, packed: PackedEncoder | None, hf_config: object) -> PoolingInfo:
        """Choose how texts are computed together, and replace the linear layers."""
        spec, base, dtype = self._spec, model.base_model, model.dtype
        own_attention = model.config._attn_implementation
        model.set_attn_implementation("eager")
        positions = Positions(base)
        max_tokens = self._max_tokens(positions.max_tokens(hf_config))
        probe = PackingProbe(model, spec, max_tokens)
        dense = NativeLinear if native_linear.preferred(torch.float32) else None
        head = self._make_head(model, dense)
        gelus = GeluFusion()
        with watch_weights(base) as keep:
            if packed is not None:
                model.set_attn_implementation(own_attention)
                base.set_attn_implementation(own_attention)
                packed.use(base, positions)
                reason = probe.reason_not_to_pack(packed, head, base)
                if reason is not None:
                    logger.warning("%s is computed in groups of equal length: %s", type(model).__name__, reason)
                    packed = None
            self._encoder = packed if packed is not None else EqualLengthEncoder(base)
            if packed is None:
                base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
            with gelus.watch(base):
                self._check(probe, head, model)
        linear = _linear(dtype)
        if linear is NativeLinear:
            gelus.apply(base, keep)
        if linear is not None:
            pack_linear_layers(base, keep, linear)
            self._check(probe, head, model)
        self._head = head
        batch_invariant = packed is not None and packed.attention.name == "native" and linear is dense is NativeLinear
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


def _attention() -> VarlenAttention:
    try:
        return NativeVarlen()
    except OSError as error:
        logger.warning("attention is computed by torch, which is slower: %s", error)
        return TorchVarlen()


def _linear(dtype: torch.dtype) -> LinearKind | None:
    if native_linear.preferred(dtype):
        return NativeLinear
    return PackedLinear if packed_linear.supports(dtype) else None
