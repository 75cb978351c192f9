"""Engine options: one dataclass a topic, and the flat `EngineArgs` that people write.

Options are checked where they are made, by `engine_args_checks` and by the engine that they are for. Imports no torch.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar

from headrace_engine.engine_args_checks import problems_of
from headrace_engine.engines import OWN_ENGINE
from headrace_engine.errors import ConfigError
from headrace_engine.logits_processor import LogitsProcessor, import_path
from headrace_engine.lora_request import LoRARequest
from headrace_engine.plain_values import plain_data, plain_list, shown
from headrace_engine.speculative_config import SpeculativeConfig
from headrace_engine.static_config import StaticConfig
from headrace_engine.vllm_names import RENAMED, with_vllm_names

SchedulingPolicy = Literal["fcfs", "priority"]
T = TypeVar("T")

_DTYPE_NAMES = {"float": "float32", "float32": "float32", "bfloat16": "bfloat16"}
_NONE_MEANS = {
    "engine": OWN_ENGINE,
    "engine_args": {},
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "max_num_seqs": 64,
    "block_size": 32,
    "enable_prefix_caching": True,
    "enforce_eager": False,
    "async_scheduling": False,
    "logits_processors": (),
    "generation_config": "auto",
    "override_generation_config": {},
}
"""What stands for None in options of which vLLM's default is None, or may be."""


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


@with_vllm_names("EngineArgs", lambda problems: ConfigError("; ".join(problems)))
@dataclass(kw_only=True)  # without slots, so that vars() gives the options
class EngineArgs:
    """The engine's options in one flat list, named as in vLLM (docs/vllm.md).

    Raises:
        ConfigError: from `create_engine_config`, naming every option that is wrong; from here, for options that are not
            known or not supported.
    """

    model: str = field(default="", kw_only=False)
    engine: str = OWN_ENGINE
    """Name of the engine that computes: headrace, or one of an installed package. Others run in a child process."""
    engine_python: str | None = None
    """Interpreter of the engine's child process, such as that of an environment with vLLM; None takes this one."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Options of another engine that have no name here."""
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    skip_tokenizer_init: bool = False
    seed: int | None = None
    dtype: str = "auto"
    """float and torch's dtypes are taken, too, where they name one that is computed here; float16 is not."""
    device: str = "auto"
    max_model_len: int | None = None
    """None takes the model's own limit; -1 as much of it as the KV memory holds."""
    trust_remote_code: bool = False
    attention_backend: str = "auto"
    max_logprobs: int = 20
    logits_processors: Sequence[str | type[LogitsProcessor]] = ()
    quantization: str | None = None
    enforce_eager: bool = False
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    batch_invariant: bool = False
    block_size: int = 32
    kv_cache_dtype: str = "auto"
    kv_cache_memory: int | None = None
    """vLLM's name kv_cache_memory_bytes means this, too."""
    num_blocks: int | None = None
    """vLLM's name num_gpu_blocks_override means this, too."""
    enable_prefix_caching: bool = True
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    """Token budget of one step. None means 512 on a CPU, where larger steps make little faster and all wait for them,
    and 2048 elsewhere; at least max_num_seqs."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_num_queued_requests: int | None = None
    max_num_queued_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    async_scheduling: bool = False
    watermark: float = 0.01
    speculative_config: Mapping[str, Any] | None = None
    """Options of `SpeculativeConfig`, such as {"method": "ngram", "num_speculative_tokens": 4}; None is off."""
    spec_method: str | None = None
    """This and the next two are the method, model and num_speculative_tokens of speculative_config."""
    spec_model: str | None = None
    spec_tokens: int | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    """None means max_loras."""
    prefill_buckets: list[int] | None = None
    """This and the next four: see `StaticConfig`."""
    decode_buckets: list[int] | None = None
    context_buckets: list[int] | None = None
    tensor_parallel_size: int = 1
    compile_cache_dir: str | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_queued_reqs: int | None = None

    def _normalised(self) -> "EngineArgs":
        """A copy with Headrace's names, and with its one form of what may be given in several.

        Raises:
            ConfigError: two names of one option contradict each other.
        """
        values = {f.name: plain_list(getattr(self, f.name)) for f in fields(self)}
        for theirs, ours in RENAMED.items():
            given, values[theirs] = values[theirs], None
            if given is None:
                continue
            if values[ours] not in (None, given):
                raise ConfigError(f"{theirs} is {shown(given)} and {ours} is {shown(values[ours])}: give one of them")
            values[ours] = given
        for name, fallback in _NONE_MEANS.items():
            if values[name] is None:
                values[name] = fallback
        for name in ("model", "tokenizer", "generation_config", "compile_cache_dir", "engine_python"):
            if isinstance(values[name], os.PathLike):
                values[name] = os.fspath(values[name])
        dtype = str(values["dtype"]).removeprefix("torch.")
        values["dtype"] = _DTYPE_NAMES.get(dtype, values["dtype"] if values["engine"] == OWN_ENGINE else dtype)
        values["engine_args"] = plain_data(values["engine_args"])
        values["override_generation_config"] = plain_data(values["override_generation_config"])
        values["speculative_config"] = self._speculative_options()
        values |= {"spec_method": None, "spec_model": None, "spec_tokens": None}
        return type(self)(**values)

    def _speculative_options(self) -> Mapping[str, Any] | None:
        short = {"method": self.spec_method, "model": self.spec_model, "num_speculative_tokens": self.spec_tokens}
        short = {name: value for name, value in short.items() if value is not None}
        if not short:
            return self.speculative_config
        if self.speculative_config is not None:
            raise ConfigError("speculative_config says what spec_method, spec_model and spec_tokens say: give one")
        return {"method": "draft_model", **short} if "model" in short else short

    def _token_budget(self) -> int:
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if self.engine != OWN_ENGINE:
            return 0
        return max(512 if self.device in ("auto", "cpu") else 2048, self.max_num_seqs)

    def create_engine_config(self) -> EngineConfig:
        return self._normalised()._create_engine_config()

    def _create_engine_config(self) -> EngineConfig:
        problems = problems_of(self)
        if problems:
            raise ConfigError("; ".join(problems))
        is_own, drafts = self.engine == OWN_ENGINE, self.speculative_config
        model = _pick(ModelConfig, self)
        model.logits_processors = [import_path(processor) for processor in self.logits_processors]
        return EngineConfig(
            model=model,
            cache=_pick(CacheConfig, self),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self._token_budget(),
                policy=self.scheduling_policy,
                max_num_queued_requests=self.max_num_queued_requests,
                max_num_queued_tokens=self.max_num_queued_tokens,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                async_scheduling=self.async_scheduling,
                watermark=self.watermark,
            ),
            speculative=SpeculativeConfig.from_map(drafts) if drafts is not None and is_own else None,
            speculative_options=dict(drafts) if drafts is not None and not is_own else None,
            lora=self._lora_config() if self.enable_lora else None,
            static=_pick(StaticConfig, self),
            engine=self.engine,
            engine_python=self.engine_python,
            engine_args=dict(self.engine_args),
        )

    def _lora_config(self) -> LoRAConfig:
        most = self.max_cpu_loras if self.max_cpu_loras is not None else self.max_loras
        return LoRAConfig(max_loras=self.max_loras, max_lora_rank=self.max_lora_rank, max_cpu_loras=most)


@with_vllm_names("EngineArgs", lambda problems: ConfigError("; ".join(problems)))
@dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """Options of `AsyncLLMEngine`."""

    core_in_process: bool = False
    """Run the core in a thread of this process instead of in a child process."""


def _pick(kind: type[T], args: EngineArgs) -> T:
    return kind(**{f.name: getattr(args, f.name) for f in fields(kind)})  # type: ignore[arg-type]
