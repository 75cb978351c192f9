"""The configuration of an engine: one dataclass for each topic. `EngineArgs` creates it from user options.

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
    """Folder or hub name of the tokenizer. None: that of the model."""
    revision: str | None = None
    """Branch, tag or commit of a model with a hub name."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer. None: that of the model."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, and outputs have no text."""
    seed: int | None = None
    """Seed for requests without a seed of their own, which makes runs repeatable. None: they get random seeds."""
    dtype: str = "auto"
    """float32, bfloat16, or auto: the type of the checkpoint, or float32 on a CPU where bfloat16 is slower."""
    device: str = "auto"
    """One of `own_engine.DEVICES`. auto is the CPU: cuda is experimental and must be requested."""
    max_model_len: int | None = None
    """Maximum tokens of prompt and output. None: the limit of the model. FITTING_LENGTH: what the KV memory holds."""
    trust_remote_code: bool = False
    attention_backend: str = "auto"
    """auto, native (compiled kernel), torch (reference) or triton (GPU kernels; on the CPU for tests only)."""
    max_logprobs: int = 20
    """Maximum number of log-probabilities that a request may ask for at one position. -1: no limit."""
    logits_processors: list[str] = field(default_factory=list)
    """Import paths of `LogitsProcessor` subclasses, applied in this order."""
    quantization: str | None = None
    """int8: round the weights of the linear layers to 8 bits at load, and their inputs in each step. CPU only."""
    enforce_eager: bool = False
    """Use no CUDA graphs, for models that they cannot hold. Slower. Device cuda only."""
    generation_config: str = "auto"
    """Source of default sampling parameters and end tokens. auto: the checkpoint; vllm: only the end tokens of the
    checkpoint; otherwise a folder with a generation_config.json."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of generation_config, by transformers' names."""
    batch_invariant: bool = False
    """Compute batch-invariant results: logits depend on the sequence only, to the last bit. Slower."""

    @property
    def tokenizer_source(self) -> tuple[str, str | None]:
        """The folder or hub name of the tokenizer, and its revision."""
        if self.tokenizer is not None:
            return self.tokenizer, self.tokenizer_revision
        return self.model, self.tokenizer_revision or self.revision


@dataclass(slots=True, kw_only=True)
class CacheConfig:
    block_size: int = 32
    """Tokens per KV block."""
    kv_cache_dtype: str = "auto"
    """bfloat16, fp8, or auto: the type of the model. Rounded keys and values take less memory, and decoding reads less.
    bfloat16 is for float32 models on the CPU and device cuda. fp8 (e4m3 with a scale of 1, at most 448) is for device
    cuda only, where it has never been run."""
    kv_cache_memory: int | None = None
    """Bytes of KV memory. None: the runner decides by the free memory."""
    num_blocks: int | None = None
    """Exact number of KV blocks, including the null block. Overrides kv_cache_memory."""
    enable_prefix_caching: bool = True


@dataclass(slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = 64
    """Maximum number of running requests."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step. 0: the default of an engine other than Headrace's."""
    policy: SchedulingPolicy = "fcfs"
    max_num_queued_requests: int | None = None
    """Refuse a request if this many are waiting, also for a grammar or adapter. None: no limit."""
    max_num_queued_tokens: int | None = None
    """Refuse a request if all waiting requests would have more tokens than this. None: no limit."""
    long_prefill_token_threshold: int = 0
    """Maximum tokens of one prompt in a step, so that a long prompt leaves budget to others. 0: the whole budget."""
    async_scheduling: bool = False
    """Launch a step while the device computes the previous one. Device cuda only."""
    watermark: float = 0.01
    """Share of the KV blocks that stays free for running requests when another one is admitted."""


@dataclass(slots=True, kw_only=True)
class LoRAConfig:
    max_loras: int = 1
    """Maximum number of adapters in one batch."""
    max_lora_rank: int = 16
    max_cpu_loras: int = 1
    """Maximum number of adapters in memory, including removed ones that are still in use. One more during a load."""
    preload: list[LoRARequest] = field(default_factory=list)
    """Adapters to load with the model. The engine does not start if one cannot be served."""
    needs_hot_load: bool = False
    """Whether other adapters will be loaded while the engine runs."""


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """The complete configuration of a core. It is sent to the child process as a plain map."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig | None = None
    lora: LoRAConfig | None = None
    """None: the engine serves no adapters."""
    static: StaticConfig = field(default_factory=StaticConfig)
    engine: str = OWN_ENGINE
    engine_python: str | None = None
    """Interpreter of the child process. None: that of this process."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """The engine's own options, by its own names. Headrace's engine has none."""
    speculative_options: dict[str, Any] | None = None
    """The unchanged speculative_config for an engine other than Headrace's."""
    runner: str = "headrace_engine.runner.loader:create_runner"
    """Import path of the function that creates the runner."""
    tokenizer: str = "headrace_engine.tokenizer_loader:load_tokenizer"
    """Import path of the function that returns the `TokenizerParts`. Called when they are needed."""

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
