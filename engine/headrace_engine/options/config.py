"""The configuration of an engine: one dataclass for each topic. `EngineArgs` creates it from user options.

An option is declared once, in the class of its topic. `EngineOptions` inherits the options of all topics. A field that
is not declared by `option` cannot be set by users: only the core reads it. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Final, Literal

from headrace_engine.options.devices import DEVICES, EAGER_DEVICES
from headrace_engine.options.speculative_config import SpeculativeConfig
from headrace_engine.options.static_config import StaticConfig
from headrace_engine.requests.lora_request import LoRARequest
from headrace_wire.option import option

SchedulingPolicy = Literal["fcfs", "priority"]

OWN_ENGINE: Final = "headrace"
"""The name of Headrace's own engine. Other engines have the names of their entry points."""

FITTING_LENGTH: Final = -1
"""This value of `max_model_len` means the longest sequence that the KV memory holds."""
DTYPES: Final = ("auto", "float32", "bfloat16")
KV_CACHE_DEVICES: Final = {"bfloat16": EAGER_DEVICES, "fp8": ("cuda",)}
"""Type of rounded keys and values -> the devices that support it."""
_CPU: Final = ("auto", "cpu")


@dataclass
class ModelOptions:
    model: str = option(
        "",
        "Model folder in Hugging Face layout, hub name, GGUF file, or smollm2-135m-instruct.",
        metavar="PATH_OR_NAME",
    )
    _: KW_ONLY
    tokenizer: str | None = option(None, "Folder or hub name of the tokenizer. None: that of the model.")
    revision: str | None = option(None, "Branch, tag or commit of a model with a hub name.")
    tokenizer_revision: str | None = option(None, "Branch, tag or commit of the tokenizer. None: that of the model.")
    skip_tokenizer_init: bool = option(False, "Load no tokenizer: prompts are token ids, and outputs have no text.")
    seed: int | None = option(
        None, "Seed for requests without a seed of their own, which makes runs repeatable. None: they get random seeds."
    )
    device: str = option(
        "auto",
        f"Where the model runs: {', '.join(DEVICES)}. auto is the CPU: cuda is experimental and must be named.",
        metavar="NAME",
        choices=tuple(DEVICES),
    )
    dtype: str = option(
        "auto",
        "Type of the weights: float32, bfloat16, or auto: that of the checkpoint, or float32 on a CPU where bfloat16 "
        "is slower.",
        metavar="NAME",
        choices=DTYPES,
        none_is_default=True,
    )
    quantization: str | None = option(
        None,
        "int8: round the weights of the linear layers to 8 bits at load, and their inputs in each step; faster, a "
        "little less exact.",
        metavar="NAME",
        choices=(None, "int8"),
        devices=_CPU,
    )
    max_model_len: int | None = option(
        None,
        "Maximum tokens of prompt and output. None: the model's limit. -1: as much of it as fits into the KV memory.",
        metavar="N",
        least=1,
    )
    trust_remote_code: bool = option(
        False, "Run Python code that comes with a checkpoint or its tokenizer.", devices=EAGER_DEVICES
    )
    attention_backend: str = option(
        "auto",
        "Paged attention kernel: auto, native (compiled), torch (reference) or triton (GPU kernels; on the CPU for "
        "tests only).",
        metavar="NAME",
        choices=("auto", "native", "torch", "triton"),
        devices=EAGER_DEVICES,
        elsewhere="is {value!r}, but device {device} has its own attention",
    )
    max_logprobs: int = option(
        20, "Maximum number of log-probabilities that a request may ask for at one position. -1: no limit.", least=-1
    )
    enforce_eager: bool = option(
        False,
        "Use no CUDA graphs, for models that cannot be captured; slower.",
        none_is_default=True,
        devices=(*EAGER_DEVICES, "static-cpu"),
        elsewhere="is set, but device {device} computes nothing that is not compiled",
    )
    generation_config: str = option(
        "auto",
        "Source of default sampling parameters and end tokens. auto: the checkpoint; vllm: only the end tokens of the "
        "checkpoint; otherwise a folder with a generation_config.json.",
        metavar="SOURCE",
        none_is_default=True,
    )
    override_generation_config: dict[str, Any] = option(
        {},
        'Values that replace those of generation_config, by transformers\' names: {"temperature": 0.7}.',
        metavar="JSON",
        none_is_default=True,
    )
    batch_invariant: bool = option(
        False,
        "Compute batch-invariant results: logits depend on the sequence only, to the last bit; slower.",
        devices=_CPU,
    )


@dataclass(kw_only=True)
class ModelConfig(ModelOptions):
    logits_processors: list[str] = field(default_factory=list)
    """Import paths of `LogitsProcessor` subclasses, applied in this order."""

    @property
    def tokenizer_source(self) -> tuple[str, str | None]:
        """The folder or hub name of the tokenizer, and its revision."""
        if self.tokenizer is not None:
            return self.tokenizer, self.tokenizer_revision
        return self.model, self.tokenizer_revision or self.revision


@dataclass(kw_only=True)
class CacheConfig:
    block_size: int = option(32, "Tokens per KV block.", least=1, none_is_default=True)
    kv_cache_dtype: str = option(
        "auto",
        "Type of keys and values: bfloat16, fp8, or auto: that of the model. Smaller types save memory and memory "
        "bandwidth, and are less exact. fp8 (e4m3 with a scale of 1, at most 448) is for device cuda only.",
        metavar="NAME",
        choices=("auto", *KV_CACHE_DEVICES),
        none_is_default=True,
    )
    kv_cache_memory: int | None = option(
        None,
        "Bytes of KV memory, or a text with a unit such as 4GiB. None: depends on the free memory; on a CPU a quarter "
        "of it, at most 4 GiB. Also named kv_cache_memory_bytes, as in vLLM.",
        metavar="SIZE",
        least=1,
    )
    num_blocks: int | None = option(
        None,
        "Exact number of KV blocks, including the null block. Overrides kv_cache_memory. Also named "
        "num_gpu_blocks_override, as in vLLM.",
        least=2,
    )
    enable_prefix_caching: bool = option(
        True, "Share the KV blocks of prompts that begin with the same tokens.", none_is_default=True
    )


@dataclass(kw_only=True)
class SchedulerOptions:
    max_num_seqs: int = option(64, "Maximum number of running requests.", metavar="N", least=1, none_is_default=True)
    max_num_queued_requests: int | None = option(
        None,
        "Refuse a request if this many are waiting, also for a grammar or adapter. None: no limit. Also named "
        "max_num_queued_reqs, as in vLLM.",
        least=1,
    )
    max_num_queued_tokens: int | None = option(
        None, "Refuse a request if all waiting requests would have more tokens than this. None: no limit.", least=1
    )
    long_prefill_token_threshold: int = option(
        0,
        "Maximum tokens of one prompt in a step, so that a long prompt leaves budget to others. 0: the whole budget.",
        metavar="N",
        least=0,
    )
    async_scheduling: bool = option(
        False,
        "Schedule and launch a step while the device computes the previous one. Device cuda only.",
        none_is_default=True,
        devices=("cuda",),
        elsewhere="is set, but only device cuda launches steps ahead, not {device}",
    )
    watermark: float = option(
        0.01,
        "Share of the KV blocks that stays free for running requests when another one is admitted.",
        metavar="SHARE",
        least=0,
        below=1,
    )


@dataclass(kw_only=True)
class SchedulerConfig(SchedulerOptions):
    max_num_batched_tokens: int = 2048
    """Token budget of one step. 0: the default of an engine other than Headrace's."""
    max_pooling_tokens: int = 1024
    """Token budget of one step of a model that embeds or scores."""
    policy: SchedulingPolicy = "fcfs"


@dataclass(kw_only=True)
class LoRAOptions:
    max_loras: int = option(1, "Maximum number of adapters in one batch.", metavar="N", least=1)
    max_lora_rank: int = option(16, "Largest rank of an adapter.", metavar="N", least=1)


@dataclass(kw_only=True)
class LoRAConfig(LoRAOptions):
    max_cpu_loras: int = 1
    """Maximum number of adapters in memory, including removed ones in use. During a load, one more is in memory."""
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
    """Interpreter of the child process. None: the interpreter of this process."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """The engine's own options, by its own names. Headrace's engine has none."""
    speculative_options: dict[str, Any] | None = None
    """The unchanged speculative_config for an engine other than Headrace's."""
    runner: str = "headrace_engine.runner.loader:create_runner"
    """Import path of the function that creates the runner."""
    tokenizer: str = "headrace_engine.text.tokenizer_loader:load_tokenizer"
    """Import path of the function that returns the `TokenizerParts`. Called when they are needed."""

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> "EngineConfig":
        lora = values["lora"]
        if lora is not None:
            lora = LoRAConfig(**{**lora, "preload": [LoRARequest.from_wire(wire) for wire in lora["preload"]]})
        topics = {
            "model": ModelConfig(**values["model"]),
            "cache": CacheConfig(**values["cache"]),
            "scheduler": SchedulerConfig(**values["scheduler"]),
            "speculative": SpeculativeConfig(**values["speculative"]) if values["speculative"] else None,
            "lora": lora,
            "static": StaticConfig(**values["static"]),
        }
        return cls(**{**values, **topics})
