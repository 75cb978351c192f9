"""The model families of the parity suite: a tiny configuration of each, with what makes the family special."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING

VOCAB_SIZE = 384
WINDOW = 20
MAX_POSITIONS = 256


@dataclass(frozen=True)
class Family:
    """One architecture: its model type in transformers, and how its tiny model differs from the common shape."""

    model_type: str
    special: str = ""
    """What sets its attention, positions or layers apart, for the table."""
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        return CONFIG_MAPPING[self.model_type](**{**COMMON, **self.options})


@dataclass(frozen=True)
class Refused(Family):
    reason: str = ""
    """The whole message; {model} stands for the model's folder."""


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
}
MLA: dict[str, Any] = {
    **MOE,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
MIXED: dict[str, Any] = {
    "num_hidden_layers": 4,
    **SLIDING,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
DELTA_NET: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_MIXED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
GPT2: dict[str, Any] = {"n_positions": MAX_POSITIONS, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
}
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
    }
}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "llama3": Family("llama", "scaled rotary frequencies", LLAMA3_ROPE),
    "llama-yarn": Family("llama", "YaRN rotary scaling", YARN),
    "mistral": Family("mistral", "sliding window", SLIDING),
    "ministral": Family("ministral", "sliding and full layers", MIXED),
    "ministral3": Family("ministral3", "query scaling by position"),
    "mixtral": Family("mixtral", "mixture of experts, sliding window", {**MOE, **SLIDING}),
    "qwen2": Family("qwen2", "attention bias", {"head_dim": 32, "hidden_size": 128}),
    "qwen2-sliding": Family(
        "qwen2", "sliding window in the last layers", {**SLIDING, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "qwen2_moe": Family("qwen2_moe", "mixture of experts with a shared one", MOE),
    "qwen3": Family("qwen3", "normalised queries and keys, one KV head", {"num_key_value_heads": 1}),
    "qwen3_moe": Family("qwen3_moe", "mixture of experts", MOE),
    "gemma": Family("gemma"),
    "gemma2": Family(
        "gemma2",
        "soft-capped scores, sliding and full layers",
        {**MIXED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family("gemma3_text", "sliding and full layers, two rotary bases", MIXED),
    "gemma3n_text": Family(
        "gemma3n_text",
        "layers that read the K/V of earlier ones",
        {
            **SLIDING,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "intermediate_size": [96] * 6,
            "activation_sparsity_pattern": None,
            "laurel_rank": 8,
        },
    ),
    "gemma4_text": Family(
        "gemma4_text",
        "head sizes differ between layers, shared K/V",
        {
            **SLIDING,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "vaultgemma": Family("vaultgemma", "soft-capped scores", {**MIXED, "query_pre_attn_scalar": 16}),
    "phi": Family("phi", "partial rotary, attention bias"),
    "phi3": Family("phi3", "merged QKV, sliding window", SLIDING),
    "phimoe": Family("phimoe", "mixture of experts", MOE),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2", "norms after the layers"),
    "olmo3": Family("olmo3", "sliding and full layers", MIXED),
    "olmoe": Family("olmoe", "mixture of experts", MOE),
    "flex_olmo": Family("flex_olmo", "mixture of experts", MOE),
    "granite": Family("granite", "scaled attention and residuals", {"attention_multiplier": 0.2}),
    "granite_swa": Family("granite_swa", "sliding window, attention sinks", MIXED),
    "granitemoe": Family("granitemoe", "mixture of experts", MOE),
    "granitemoeshared": Family("granitemoeshared", "mixture of experts", {**MOE, "shared_intermediate_size": 32}),
    "cohere": Family("cohere", "interleaved rotary"),
    "cohere2": Family("cohere2", "sliding layers, full ones without positions", MIXED),
    "cohere2_moe": Family("cohere2_moe", "mixture of experts", {**MOE, **MIXED}),
    "starcoder2": Family("starcoder2", "attention bias, sliding window", SLIDING),
    "gpt_oss": Family("gpt_oss", "attention sinks, sliding layers, mixture of experts", {**MOE, **MIXED}),
    "deepseek_v2": Family("deepseek_v2", "latent attention: head sizes 32 and 20", MLA),
    "deepseek_v3": Family("deepseek_v3", "latent attention: head sizes 32 and 20", MLA),
    "glm4_moe_lite": Family("glm4_moe_lite", "latent attention", MLA),
    "youtu": Family("youtu", "latent attention", MLA),
    "minicpm3": Family("minicpm3", "latent attention", MLA),
    "longcat_flash": Family(
        "longcat_flash",
        "latent attention twice a layer",
        {
            **MLA,
            "num_layers": 2,
            "zero_expert_num": 2,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "moe_topk": 2,
        },
    ),
    "smollm3": Family(
        "smollm3", "layers without positions", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], **SLIDING}
    ),
    "glm": Family("glm", "partial rotary"),
    "glm4": Family("glm4", "partial rotary, four norms"),
    "glm4_moe": Family("glm4_moe", "mixture of experts", MOE),
    "gpt2": Family("gpt2", "learned positions", GPT2),
    "gpt_bigcode": Family("gpt_bigcode", "multi-query, learned positions", GPT2),
    "gpt_neox": Family("gpt_neox", "merged QKV, partial rotary", {"rotary_pct": 0.25}),
    "opt": Family("opt", "learned positions", {"word_embed_proj_dim": 64, "ffn_dim": 96, "dropout": 0.0}),
    "ctrl": Family("ctrl", "sinusoidal positions", {"dff": 96}),
    "persimmon": Family("persimmon", "partial rotary, merged QKV"),
    "nemotron": Family("nemotron", "partial rotary"),
    "exaone4": Family("exaone4", "full layers without positions", {**MIXED, "sliding_window_pattern": 2}),
    "exaone_moe": Family("exaone_moe", "mixture of experts", {**MOE, **MIXED}),
    "ernie4_5": Family("ernie4_5", "interleaved rotary"),
    "ernie4_5_moe": Family(
        "ernie4_5_moe", "mixture of experts", {**MOE, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
    ),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense", "normalised queries and keys"),
    "hunyuan_v1_moe": Family("hunyuan_v1_moe", "mixture of experts", {**MOE, "moe_topk": 2}),
    "hy_v3": Family("hy_v3", "mixture of experts", MOE),
    "seed_oss": Family("seed_oss", "attention bias"),
    "arcee": Family("arcee"),
    "apertus": Family("apertus", "normalised queries and keys"),
    "helium": Family("helium", "interleaved rotary"),
    "bitnet": Family("bitnet", "norms inside attention"),
    "aria_text": Family("aria_text", "mixture of experts", {**MOE, "moe_num_experts": 4, "moe_topk": 2}),
    "afmoe": Family("afmoe", "gated attention, mixture of experts", {**MOE, **MIXED}),
    "dots1": Family("dots1", "mixture of experts, sliding layers", {**MOE, **MIXED}),
    "minimax_m2": Family("minimax_m2", "mixture of experts", MOE),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        "attention sinks, two head sizes, two KV head counts",
        {
            **MOE,
            **MIXED,
            "v_head_dim": 24,
            "swa_head_dim": 16,
            "swa_v_head_dim": 24,
            "swa_num_key_value_heads": 4,
            "swa_num_attention_heads": 4,
        },
    ),
    "solar_open": Family("solar_open", "mixture of experts", MOE),
    "laguna": Family("laguna", "mixture of experts", {**MOE, **MIXED}),
    "mellum": Family("mellum", "mixture of experts", {**MOE, **MIXED}),
    "flint": Family("flint", "attention sinks", {**MOE, **MIXED}),
    "kolibri1": Family("kolibri1", "", {**MOE, **MIXED}),
    "hyperclovax": Family("hyperclovax", "scaled attention"),
    "jais2": Family("jais2", "attention bias"),
    "cwm": Family("cwm", "sliding and full layers", MIXED),
    "nanochat": Family("nanochat", "normalised queries and keys"),
    "modernbert-decoder": Family("modernbert-decoder", "sliding and full layers", {**MIXED, "local_attention": WINDOW}),
    "hrm_text": Family("hrm_text", "layers that run several times in a pass"),
    "diffllama": Family("diffllama", "differential attention"),
    "beam": Family("beam", ""),
    "jetmoe": Family("jetmoe", "experts for attention", {**MOE, "kv_channels": 16}),
    "dbrx": Family(
        "dbrx",
        "merged QKV, mixture of experts",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": MAX_POSITIONS,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {
                "ffn_hidden_size": 32,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 64,
                "ffn_act_fn": {"name": "silu"},
            },
        },
    ),
    "bert": Family("bert", "as a decoder; learned positions", {"is_decoder": True}),
    "roberta": Family("roberta", "as a decoder; learned positions", {"is_decoder": True}),
    "axk1": Family("axk1", "latent attention", MLA),
    "granitemoe_swa": Family("granitemoe_swa", "attention sinks, mixture of experts", {**MOE, **MIXED}),
    "minimax_m3_vl_text": Family("minimax_m3_vl_text", "mixture of experts; its sparse layers are refused", MOE),
    "lfm2": Family("lfm2", "short convolutions", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2_moe": Family(
        "lfm2_moe", "short convolutions, mixture of experts", {**MOE, "layer_types": ["conv", "full_attention", "conv"]}
    ),
    "lfm3": Family(
        "lfm3",
        "short convolutions, sliding and full layers",
        {**SLIDING, "layer_types": ["conv", "full_attention", "sliding_attention"]},
    ),
    "olmo_hybrid": Family("olmo_hybrid", "gated delta nets", {**DELTA_NET, **_MIXED_DELTA}),
    "falcon_h1": Family("falcon_h1", "Mamba 2 beside attention in each layer", {**MAMBA2, "mamba_d_ssm": 128}),
    "nemotron_h": Family(
        "nemotron_h",
        "Mamba 2, layers of one part each",
        {
            **MOE,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        "Mamba 2, mixture of experts",
        {
            **MOE,
            **MAMBA2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_intermediate_size": 96,
        },
    ),
    "qwen3_next": Family(
        "qwen3_next", "gated delta nets, gated attention, mixture of experts", {**MOE, **DELTA_NET, **_MIXED_DELTA}
    ),
    "qwen3_5_text": Family("qwen3_5_text", "gated delta nets, gated attention", {**DELTA_NET, **_MIXED_DELTA}),
    "qwen3_5_moe_text": Family(
        "qwen3_5_moe_text",
        "gated delta nets, gated attention, mixture of experts",
        {**MOE, **DELTA_NET, **_MIXED_DELTA},
    ),
}

_STATEFUL = (
    "model '{model}' is a %s, which keeps a recurrent state of another kind than convolutions and linear attention "
    "beside layers of attention"
)
_NO_INTERFACE = (
    "model '{model}' is a %s, whose attention cannot be replaced by a paged one (transformers' "
    "_supports_attention_backend is not set)"
)
_MIXES = (
    "%s cannot be served: it carries information from token to token outside of its attention (a recurrent or "
    "convolution layer, or attention that is not routed through the attention interface)"
)
_ODD_MASK = (
    "%s cannot be served: it has attention that is neither plainly causal nor a sliding window (chunked, "
    "bidirectional or prefix)"
)
_UNKNOWN = "%s cannot be served: it passes %s to its attention, which paged attention does not support"
_SPARSE: dict[str, Any] = {**MLA, "index_topk": 2048, "index_head_dim": 16, "index_n_heads": 2}

REFUSED: dict[str, Refused] = {
    "bert-encoder": Refused("bert", "sees what comes after", reason=_ODD_MASK % "BertLMHeadModel"),
    "llama4_text": Refused(
        "llama4_text",
        "chunked attention",
        {**MOE, "attention_chunk_size": 32, "intermediate_size_mlp": 96},
        reason="model '{model}' (llama4_text) attends in chunks (attention_chunk_size), which paged attention does not "
        "support",
    ),
    "deepseek_v32": Refused(
        "deepseek_v32", "sparse attention", _SPARSE, reason=_UNKNOWN % ("DeepseekV32ForCausalLM", "indices")
    ),
    "glm_moe_dsa": Refused(
        "glm_moe_dsa", "sparse attention", _SPARSE, reason=_UNKNOWN % ("GlmMoeDsaForCausalLM", "indices")
    ),
    "axk2": Refused("axk2", "sparse attention", _SPARSE, reason=_UNKNOWN % ("AXK2ForCausalLM", "indices")),
    "hy_v4": Refused("hy_v4", "sparse attention", _SPARSE, reason=_UNKNOWN % ("HYV4ForCausalLM", "indices")),
    "doge": Refused(
        "doge",
        "masks made from the hidden states",
        reason="DogeForCausalLM cannot be served: it computes attention masks of its own, from more than the positions "
        "of tokens",
    ),
    "moshi": Refused(
        "moshi",
        "sliding cache under full masks",
        SLIDING,
        reason="MoshiForCausalLM cannot be served: it forgets keys after 20 tokens, but its attention masks show all "
        "of them: its output depends on how a prompt is cut into steps",
    ),
    "minimax": Refused("minimax", "linear attention", MOE, reason=_MIXES % "MiniMaxForCausalLM"),
    "jamba": Refused(
        "jamba",
        "Mamba layers that forget their state in a prompt's second step",
        {**MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8, "use_mamba_kernels": False},
        reason="JambaForCausalLM cannot be served: it has layers of type JambaMambaMixer, whose result depends on how "
        "a prompt is cut into steps",
    ),
    "recurrent_gemma": Refused("recurrent_gemma", "recurrent state", reason=_MIXES % "RecurrentGemmaForCausalLM"),
    **{
        model_type: Refused(model_type, "recurrent state", reason=_STATEFUL % name)
        for model_type, name in (
            ("bamba", "BambaForCausalLM"),
            ("deepseek_v4", "DeepseekV4ForCausalLM"),
            ("mamba2", "Mamba2ForCausalLM"),
            ("rwkv", "RwkvForCausalLM"),
        )
    },
    **{
        model_type: Refused(model_type, "attention without the interface", reason=_NO_INTERFACE % name)
        for model_type, name in (
            ("bloom", "BloomForCausalLM"),
            ("codegen", "CodeGenForCausalLM"),
            ("falcon", "FalconForCausalLM"),
            ("gpt_neo", "GPTNeoForCausalLM"),
            ("gptj", "GPTJForCausalLM"),
            ("mpt", "MptForCausalLM"),
            ("stablelm", "StableLmForCausalLM"),
            ("xglm", "XGLMForCausalLM"),
        )
    },
    "t5": Refused(
        "t5",
        "cross attention",
        reason="model '{model}' is an encoder-decoder (t5); only decoders are served, as cross attention has no paged "
        "form here",
    ),
    "vit": Refused(
        "vit",
        "no language model",
        reason="model '{model}' is of type 'vit', which is not a decoder that transformers supports",
    ),
}
