"""The configuration of an engine: one dataclass a topic. `EngineArgs` creates it from the options that users write.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from headrace_engine.engine_names import OWN_ENGINE
from headrace_engine.lora_request import LoRARequest
from headrace_engine.speculative_config import SpeculativeConfig
from headrace_engine.static_config import StaticConfig

SchedulingPolicy = Literal["fcfs", "priority"]

FITTING_LENGTH: Final = -1
"""As `max_model_len`: the longest sequence that the KV memory holds."""


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    model: str
    """Folder in Hugging Face layout, a hub name, or a GGUF file, which is dequantised."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; None takes the model's."""
    revision: str | None = None
    """Branch, tag or commit of a model with a hub name."""
    tokenizer_revision: str | None = None
    """The same for the tokenizer; None takes the model's."""
    skip_tokenizer_init: bool = False
    """Without a tokenizer: prompts are token ids, outputs have no text."""
    seed: int | None = None
    """Makes requests without a seed of their own draw the same in each run; None: they draw anew."""
    dtype: str = "auto"
    """float32, bfloat16, or auto: the checkpoint's own, float32 on a CPU that computes bfloat16 more slowly."""
    device: str = "auto"
    """One of `own_engine.DEVICES`. auto is the CPU: cuda is experimental, and is taken only by those who ask for it."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; None takes the model's own limit, FITTING_LENGTH what KV memory holds."""
    trust_remote_code: bool = False
    attention_backend: str = "auto"
    """auto, native (compiled kernel), torch (reference) or triton (GPU kernels; on the CPU to check them only)."""
    max_logprobs: int = 20
    """Most log-probabilities a request may ask for at one position; -1 means no limit."""
    logits_processors: list[str] = field(default_factory=list)
    """Import paths of `LogitsProcessor` subclasses, applied in this order."""
    quantization: str | None = None
    """int8: round the weights of the decoder's linear layers to 8 bits at load, and their inputs at each step. CPU."""
    enforce_eager: bool = False
    """Without CUDA graphs, for models whose decoding step they cannot hold. Of device cuda only; slower."""
    generation_config: str = "auto"
    """Defaults of sampling parameters, and end tokens. auto: the checkpoint's; vllm: its end tokens only; else
    a folder, whose generation_config.json has both."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Defaults that replace those, by transformers' names."""
    batch_invariant: bool = False
    """Make logits a function of the sequence alone to the last bit, whatever is computed beside it; slower."""

    @property
    def tokenizer_source(self) -> tuple[str, str | None]:
        """Where the tokenizer is: a folder or hub name, and its revision."""
        if self.tokenizer is not None:
            return self.tokenizer, self.tokenizer_revision
        return self.model, self.tokenizer_revision or self.revision


@dataclass(slots=True, kw_only=True)
class CacheConfig:
    block_size: int = 32
    """Tokens a KV block."""
    kv_cache_dtype: str = "auto"
    """bfloat16, fp8, or auto: the model's. The others round keys and values, so that a token takes less memory and
    decoding reads less: bfloat16 is meant for float32 models on the CPU and device cuda; fp8 (e4m3 with a scale of 1,
    larger numbers become 448) is known on device cuda only, where it has never run."""
    kv_cache_memory: int | None = None
    """Bytes of KV memory; None lets the runner decide from what the machine has."""
    num_blocks: int | None = None
    """Exact number of KV blocks, null block included; overrides kv_cache_memory."""
    enable_prefix_caching: bool = True


@dataclass(slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = 64
    """Most requests that run at once."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step; 0 leaves it to an engine other than ours."""
    policy: SchedulingPolicy = "fcfs"
    max_num_queued_requests: int | None = None
    """Refuse a request when this many are waiting, for their grammar or adapter too; None means no limit."""
    max_num_queued_tokens: int | None = None
    """Refuse a request with which the waiting ones would have more tokens than this; None means no limit."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in one step, so that a long one leaves budget to others; 0 means the whole budget."""
    async_scheduling: bool = False
    """Schedule and launch a step while the device computes the one before it. Device cuda."""
    watermark: float = 0.01
    """Share of the KV blocks that stays free when a request is admitted beside running ones, for these to grow."""


@dataclass(slots=True, kw_only=True)
class LoRAConfig:
    max_loras: int = 1
    """Most adapters in one batch."""
    max_lora_rank: int = 16
    max_cpu_loras: int = 1
    """Most adapters in memory, those included that were removed but are still in use; one more while it is read."""
    preload: list[LoRARequest] = field(default_factory=list)
    """Loaded with the model; one that cannot be served keeps the engine from starting."""
    needs_hot_load: bool = False
    """Whether others are to be loaded while it runs."""


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """Everything that a core needs; travels to the child process as a plain map."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig | None = None
    lora: LoRAConfig | None = None
    """None: the engine serves no adapters."""
    static: StaticConfig = field(default_factory=StaticConfig)
    engine: str = OWN_ENGINE
    engine_python: str | None = None
    """Interpreter of the child process; None takes this one."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """The engine's own options, by its own names; ours has none."""
    speculative_options: dict[str, Any] | None = None
    """speculative_config as it was given, where the engine is not ours."""
    runner: str = "headrace_engine.runner.loader:create_runner"
    """Import path of the function that makes the runner from this config."""
    tokenizer: str = "headrace_engine.tokenizer_loader:load_tokenizer"
    """Import path of the function that gives the `TokenizerParts`; called when a door or a grammar needs them."""

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> "EngineConfig":
        lora = values["lora"]
        if lora is not None:
            lora = LoRAConfig(**{**lora, "preload": [LoRARequest.from_wire(wire) for wire in lora["preload"]]})
        return cls(
            model=ModelConfig(**values["model"]),
            cache=CacheConfig(**values["cache"]),
            scheduler=SchedulerConfig(**values["scheduler"]),
            speculative=SpeculativeConfig(**values["speculative"]) if values["speculative"] else None,
            lora=lora,
            static=StaticConfig(**values["static"]),
            engine=values["engine"],
            engine_python=values["engine_python"],
            engine_args=values["engine_args"],
            speculative_options=values["speculative_options"],
            runner=values["runner"],
            tokenizer=values["tokenizer"],
        )
