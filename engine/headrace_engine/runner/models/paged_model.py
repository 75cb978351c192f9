"""`PagedModel`: a transformers model with the paged K/V memory of its attention.

A runner may have two: the served model and, for speculative decoding, the draft model. They share block ids, but not
memory.
"""

import logging
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace_engine.checkpoints.checkpoint import fingerprint
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.options.config import CacheConfig, ModelConfig
from headrace_engine.runner.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec, scale_of
from headrace_engine.runner.attention.native import NativeBackend
from headrace_engine.runner.attention.selection import choose_backend
from headrace_engine.runner.batch import StepInputs
from headrace_engine.runner.contracts import ModelInfo, NewRequest
from headrace_engine.runner.elementwise import native_ops
from headrace_engine.runner.fused.decoder_stack import DecoderStack, stackable
from headrace_engine.runner.fused.expert_fusion import replace_experts
from headrace_engine.runner.fused.fusion import decoder_layers, fuse_decoder_layers
from headrace_engine.runner.fused.short_forward import ShortForward
from headrace_engine.runner.linear import grouped_linear, int8_linear, native_linear, packed_linear
from headrace_engine.runner.linear.native_linear import NativeLinear
from headrace_engine.runner.linear.packed_linear import PackedLinear
from headrace_engine.runner.linear.prepared_linear import DeviceLinear, LinearKind, TritonLinear
from headrace_engine.runner.linear.quantised_weight import QuantisedWeight
from headrace_engine.runner.linear.replacement import pack_linear_layers, watch_weights
from headrace_engine.runner.lora.layers import LoRALayers
from headrace_engine.runner.memory import check_model_fits
from headrace_engine.runner.models import generation, loading, probe, rope, row_tiles
from headrace_engine.runner.models.load_plan import plan_load
from headrace_engine.runner.models.probe import ModelLayout
from headrace_engine.runner.recurrent.recurrent_layers import RecurrentLayers

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_CACHE_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class PagedModel:
    """Loads the model in float32 or bfloat16. `allocate` allocates the K/V memory.

    Args:
        fuse_layers: replace decoder layers by fused ones, which do not call the original modules.
        packed: replace linear layers by layers that a CPU computes faster. Otherwise torch computes the products, as on
            a GPU.
        device: the device of the model. The model is read and inspected on the CPU, then moved there.

    Raises:
        ModelLoadError: the model cannot be loaded.
        ConfigError: an option does not fit the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: CacheConfig,
        *,
        fuse_layers: bool = True,
        packed: bool = True,
        device: torch.device = _CPU,
    ) -> None:
        self._device = device
        plan = plan_load(config, packed=packed, device=device)
        hf_config, dtype, max_model_len = plan.hf_config, plan.dtype, plan.max_model_len
        self._metadata: AttentionMetadata | None = None
        self._next_layer = 0
        self._model: PreTrainedModel = loading.load_weights(
            config, hf_config, dtype, self._attention, form=plan.form, device=device
        )
        rope.fix_length_dependent_rope(self._model, config, max_model_len)
        self._recurrent = RecurrentLayers(self._model)
        with watch_weights(self._model) as read_weights:
            self._layout: ModelLayout = probe.inspect_model(self._model, max_model_len, self._recurrent)
        self.spec = AttentionSpec(
            layers=self._layout.layers,
            block_size=cache.block_size,
            dtype=dtype,
            cache_dtype=_CACHE_DTYPES[cache.kv_cache_dtype],
        )
        self._backend: AttentionBackend = choose_backend(config.attention_backend, self.spec, self._device)
        self._check_recurrent(config)
        check_model_fits(self._model, device)
        self._model.to(device)
        if config.batch_invariant and self._backend.name != "native":
            raise ConfigError("batch_invariant needs the compiled attention kernel, which cannot serve this model here")
        generation_config = generation.read_generation_config(config, self._model.generation_config)
        self.info = ModelInfo(
            vocab_size=hf_config.get_text_config().vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=generation.eos_token_ids(generation_config, hf_config, config.model),
            default_sampling_params=generation.default_sampling_params(config, generation_config),
            architecture=type(self._model).__name__,
            dtype=str(dtype).removeprefix("torch."),
            device=device.type,
            attention=self._backend.name,
            num_parameters=_num_parameters(self._model),
            weights=fingerprint(config.model, config.revision),
        )
        self.num_fused = self.num_packed = 0
        self.num_grouped = len(grouped_linear.grouped_weights(self._model))
        self._stack: DecoderStack | None = None
        self._short_forward: ShortForward | None = None
        if packed:
            self._pack_products(config, read_weights, fuse_layers=fuse_layers)
        elif fuse_layers:
            linear = TritonLinear if self._backend.name == "triton" else DeviceLinear
            self.num_fused = fuse_decoder_layers(self._model, self.info.max_model_len, read_weights, linear)
        self._in_tiles = config.batch_invariant and not self._has_batch_invariant_products()
        self._lora: LoRALayers | None = None

    @property
    def bytes_per_block(self) -> int:
        return self._backend.bytes_per_block

    @property
    def bytes_per_state(self) -> int:
        """The states of all recurrent layers of one request. 0 if there are no such layers."""
        return self._recurrent.bytes_per_state

    def _check_recurrent(self, config: ModelConfig) -> None:
        """Raise an error if the model has recurrent layers that the device or an option does not fit."""
        name = type(self._model).__name__
        if not self._recurrent:
            return
        if self._device.type != "cpu":
            raise ModelLoadError(
                f"model {config.model!r} is a {name}, whose recurrent layers are served on device cpu only; for a GPU "
                "set engine to vllm"
            )
        if config.batch_invariant:
            raise ConfigError(
                f"batch_invariant is set, but the recurrent layers of {name} give results whose last bits depend on "
                "how a prompt is cut into steps"
            )

    def _pack_products(self, config: ModelConfig, keep: Collection[torch.nn.Module], *, fuse_layers: bool) -> None:
        """Replace the linear layers, except `keep`, by the fastest layers for this CPU."""
        dtype = self.spec.dtype
        exact: LinearKind | None = PackedLinear if packed_linear.supports(dtype) else None
        if native_linear.preferred(dtype):
            exact = NativeLinear
        linear = exact
        if config.quantization == "int8":
            int8_linear.check_supported()
            linear = int8_linear.Int8Linear
        if linear is None:
            return
        if exact is NativeLinear:
            replace_experts(self._model)
        if fuse_layers and native_ops.is_built():
            self.num_fused = fuse_decoder_layers(self._model, self.info.max_model_len, keep, linear)
            self._stack = self._stack_layers()
        head = self._model.get_output_embeddings()  # rounding it would cost more quality than rounding all layers
        self.num_packed = pack_linear_layers(self._model, {*keep, head}, linear)
        if exact is not None:
            self.num_packed += pack_linear_layers(self._model, keep, exact)
        if self._stack is not None and self._layout.keeps_logits:
            self._short_forward = ShortForward.of(self._model, self._stack, self.info.max_model_len)

    def enable_lora(self, max_rank: int) -> LoRALayers:
        """Enable LoRA adapters of at most this rank.

        Raises:
            ConfigError: the model computes the logits of all tokens, so the rows of an adapter are unknown.
        """
        if not self._layout.keeps_logits:
            raise ConfigError(f"LoRA adapters need logits_to_keep, which {self.info.architecture} does not have")
        self._lora = LoRALayers(self._model, self._model.get_output_embeddings(), max_rank, self.spec.dtype)
        return self._lora

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        self._backend.allocate(num_blocks)
        self._recurrent.allocate(num_states)
        if self._stack is not None:
            self._stack.bind()

    def _has_batch_invariant_products(self) -> bool:
        """Whether native kernels compute all products. Their results are batch-invariant."""
        return self._stack is not None and isinstance(self._model.get_output_embeddings(), NativeLinear)

    def _stack_layers(self) -> DecoderStack | None:
        """Replace all layers by a `DecoderStack` if that is possible."""
        if not isinstance(self._backend, NativeBackend):
            return None
        layers = stackable(decoder_layers(self._model) or nn.ModuleList())
        # A model may run its layers twice, or have attention outside of them.
        if not layers or list(self._layout.modules) != [layer.attention for layer in layers]:
            return None
        if any(layer.kv_source is not None for layer in self._layout.layers):
            return None
        try:
            stack = DecoderStack(layers, self._backend)
        except OSError as error:
            logger.warning("decoder layers are computed one by one, which is slower: %s", error)
            return None
        self._model.get_decoder().layers = nn.ModuleList([stack])
        return stack

    def restore_states(self, arrivals: Iterable[NewRequest]) -> None:
        """Copy the recurrent states from which requests start."""
        for arrival in arrivals:
            if arrival.state_source is not None:
                assert arrival.state_slot is not None
                self._recurrent.copy(arrival.state_source, arrival.state_slot)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Compute the packed tokens. Return the logits at `inputs.logits_indices`, [indices, vocabulary]."""
        if not self._in_tiles:
            return self._forward(inputs)
        parts, order = [], []
        for tile, (logits_rows, rows) in row_tiles.split(inputs):
            parts.append(self._forward(tile)[rows])
            order.append(logits_rows)
        return torch.cat(parts)[torch.cat(order).argsort()]

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        if self._lora is not None:
            self._lora.use(inputs)
        self._metadata, self._next_layer = inputs.metadata, 0
        self._recurrent.groups = inputs.state_groups
        if self._stack is not None:
            self._stack.inputs = inputs
        keeps_logits = self._layout.keeps_logits
        try:
            if self._short_forward is not None:
                return self._short_forward(inputs)
            logits: torch.Tensor = self._model(
                input_ids=inputs.input_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                **({"logits_to_keep": inputs.logits_indices} if keeps_logits else {}),
            ).logits[0]
        finally:
            self._metadata = None
            if self._stack is not None:
                self._stack.inputs = None
        return logits if keeps_logits else logits[inputs.logits_indices]

    def _attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002  # the window of each layer was determined at load
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention.

        transformers calls it in every layer: query [1, heads, tokens, dim] -> [1, tokens, heads, dim].
        """
        assert self._metadata is not None
        layer = self._next_layer
        assert module is self._layout.modules[layer], "the forward pass calls its layers in another order than at load"
        self._next_layer += 1
        output = self._backend.forward(
            layer,
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self._metadata,
            scale=scale_of(scaling, query.shape[-1]),
            softcap=softcap,
            sinks=s_aux,
        )
        return output[None], None


def _num_parameters(model: nn.Module) -> int:
    """Return the number of parameters, and of quantised weights, which are none."""
    quantised: list[Any] = [each for each in model.modules() if isinstance(each, QuantisedWeight)]
    quantised += grouped_linear.grouped_weights(model)
    return sum(parameter.numel() for parameter in model.parameters()) + sum(
        weight.in_features * weight.out_features for weight in quantised
    )
