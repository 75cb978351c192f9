"""Loads a Hugging Face folder into a `StaticDecoder`: the supported architectures, and the weights of each rank."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open
from transformers import GenerationConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from headrace_engine.checkpoints.checkpoint import pretrained_source
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.options.config import ModelConfig
from headrace_engine.runner.models import generation
from headrace_engine.runner.models.load_errors import permanent_errors
from headrace_engine.runner.static.decoder import DecoderSpec, Reduce, StaticDecoder

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

# Other types change their frequencies with the length of a sequence, which a table of positions cannot express.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_LAYER_TYPES = ("full_attention", "sliding_attention")

# Weights that are divided among the ranks, by their output or input dimension. All other parameters are replicated.
_BY_OUTPUT = ("q_proj.", "k_proj.", "v_proj.", "gate_proj.", "up_proj.")
_BY_INPUT = ("o_proj.weight", "down_proj.weight")


def decoder_spec(name: str, hf_config: Any) -> DecoderSpec:
    """Return the architecture. Raises ModelLoadError with the reason if it is not supported."""
    architecture = (getattr(hf_config, "architectures", None) or [type(hf_config).__name__])[0]
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"model {name!r} is a {architecture}; devices with static shapes serve {', '.join(ARCHITECTURES)}"
        )
    problems = list(_unsupported(hf_config))
    if problems:
        raise ModelLoadError(f"model {name!r} cannot be served by a device with static shapes: {'; '.join(problems)}")
    is_qwen2 = architecture.startswith("Qwen2")
    bias = is_qwen2 or bool(getattr(hf_config, "attention_bias", False))
    num_heads: int = hf_config.num_attention_heads
    return DecoderSpec(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=hf_config.num_key_value_heads or num_heads,
        head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads,
        windows=_windows(hf_config),
        norm_eps=hf_config.rms_norm_eps,
        qkv_bias=bias,
        output_bias=bias and not is_qwen2,
        mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
        qk_norm=architecture.startswith("Qwen3"),
    )


def _unsupported(hf_config: Any) -> Iterator[str]:
    rope_type = hf_config.rope_parameters.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        yield f"its rotary embedding must be one of {', '.join(_ROPE_TYPES)}, got {rope_type!r}"
    if hf_config.hidden_act != "silu":
        yield f"its activation must be silu, got {hf_config.hidden_act!r}"
    if getattr(hf_config, "quantization_config", None):
        yield "its weights are quantised"
    unknown = sorted(set(getattr(hf_config, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if unknown:
        yield f"its layers must be of types {', '.join(_LAYER_TYPES)}, got {', '.join(unknown)}"


def _windows(hf_config: Any) -> tuple[int | None, ...]:
    window: int | None = getattr(hf_config, "sliding_window", None)
    kinds = getattr(hf_config, "layer_types", None)
    if kinds is None:
        return (window,) * hf_config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def check_ranks(spec: DecoderSpec, num_ranks: int) -> None:
    """Raise ConfigError that names what cannot be divided evenly among the ranks."""
    counts = {
        "attention heads": spec.num_heads,
        "key and value heads": spec.num_kv_heads,
        "feed-forward features": spec.intermediate_size,
    }
    problems = [f"the model's {count} {what}" for what, count in counts.items() if count % num_ranks]
    if problems:
        raise ConfigError(f"tensor_parallel_size must divide {' and '.join(problems)}, got {num_ranks}")


def load_decoder(
    config: ModelConfig,
    hf_config: Any,
    *,
    dtype: torch.dtype,
    max_positions: int,
    device: torch.device,
    rank: int = 0,
    num_ranks: int = 1,
    reduce: Reduce | None = None,
) -> StaticDecoder:
    """Load the module to the device, without K/V memory. Raises ModelLoadError."""
    spec = decoder_spec(config.model, hf_config)
    check_ranks(spec, num_ranks)
    with torch.device("meta"):
        decoder = StaticDecoder(spec, num_ranks, reduce)
    tied = bool(hf_config.tie_word_embeddings)
    with ExitStack() as stack:
        # the files stay open until every tensor is read; nothing is unpickled
        source: dict[str, Any] = {}
        for path in _files(config.model, config.revision):
            handle = stack.enter_context(safe_open(path, framework="pt"))
            source |= dict.fromkeys(handle.keys(), handle)
        names = [name for name, _ in decoder.named_parameters() if not (tied and name == "lm_head.weight")]
        missing = [name for name in names if name not in source]
        if missing:
            raise ModelLoadError(f"model {config.model!r} lacks {len(missing)} weights, the first is {missing[0]!r}")
        state = {}
        for name in names:
            value = _part(source[name].get_slice(name), name, rank, num_ranks)
            expected = decoder.get_parameter(name).shape
            if value.shape != expected:
                raise ModelLoadError(
                    f"weight {name!r} of model {config.model!r} has shape {list(value.shape)}, "
                    f"its config asks for {list(expected)}"
                )
            state[name] = value.to(device=device, dtype=dtype)
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    decoder.load_state_dict(state, assign=True)
    decoder.requires_grad_(False)
    rotary = LlamaRotaryEmbedding(hf_config)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * rotary.inv_freq.float()
    angles = torch.cat((angles, angles), dim=-1)
    for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
        decoder.register_buffer(name, (table * rotary.attention_scaling).to(device=device, dtype=dtype), False)
    return decoder.eval()


def _part(slices: Any, name: str, rank: int, num_ranks: int) -> torch.Tensor:
    """Read only the part of a tensor that this rank needs."""
    shape = slices.get_shape()
    if num_ranks > 1 and any(mark in name for mark in _BY_OUTPUT):
        size = shape[0] // num_ranks
        part: torch.Tensor = slices[rank * size : (rank + 1) * size]
    elif num_ranks > 1 and name.endswith(_BY_INPUT):
        size = shape[1] // num_ranks
        part = slices[:, rank * size : (rank + 1) * size].contiguous()
    else:
        part = slices[:]
    return part


def _files(model: str, revision: str | None) -> list[str]:
    """Return the safetensors files of the checkpoint. Raises ModelLoadError if there are none."""
    try:
        options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
        whole = cached_file(model, SAFE_WEIGHTS_NAME, **options)
        if whole is not None:
            return [whole]
        index = cached_file(model, SAFE_WEIGHTS_INDEX_NAME, **options)
        if index is not None:
            return list(get_checkpoint_shard_files(model, index, revision=revision)[0])
    except OSError as error:
        raise ModelLoadError(f"model {model!r} cannot be read: {error}") from error
    raise ModelLoadError(f"model {model!r} has no {SAFE_WEIGHTS_NAME}: only safetensors are loaded")


def read_generation_config(config: ModelConfig) -> GenerationConfig | None:
    """Return the generation config that the options name, if it exists. Raises ModelLoadError."""
    source, options = pretrained_source(config.model, config.revision)
    with permanent_errors(config.model, "read"):
        try:
            own = GenerationConfig.from_pretrained(source, **options)
        except OSError:
            own = None
    return generation.read_generation_config(config, own)
