"""What an operator sets on a worker: environment variables `HEADRACE_*`, of the same names as the CLI's flags."""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, Field, Json, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from headrace_broker.errors import SettingsError
from headrace_broker.messages import name_problems
from headrace_broker.settings import BrokerSettings
from headrace_engine import default_model
from headrace_engine.config import EngineConfig
from headrace_engine.engine_args import EngineArgs
from headrace_engine.engine_names import OWN_ENGINE
from headrace_engine.engines import find_engine
from headrace_engine.logits_processor import load_logits_processors
from headrace_monitoring.labels import MAX_TENANTS, NO_TENANT, OTHER
from headrace_workers.adapters import Adapters
from headrace_workers.answer_formats import AUTO, HARMONY, NONE, REASONING_FORMATS, TOOL_FORMATS, go_together
from headrace_workers.errors import WorkerSettingsError

STALL_SECONDS = 60.0
"""Of an engine that names no limit of its own."""
STEP_TIMEOUT_SECONDS = 120.0


def _split(value: object) -> object:
    return [int(part) for part in value.split(",")] if isinstance(value, str) else value


Buckets = Annotated[list[int] | None, NoDecode, BeforeValidator(_split)]
"""Numbers separated by commas."""


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


class WorkerSettings(BaseSettings):
    """One worker: its model, its engine's limits, its place in the service.

    The broker's own settings (`HEADRACE_REDIS_URL`, lease and TTL times) are read by `BrokerSettings`.
    """

    model_config = SettingsConfigDict(env_prefix="HEADRACE_", extra="ignore", env_ignore_empty=True)

    model: str
    """Model folder or hub name; `smollm2-135m-instruct` is fetched on demand."""
    served_model_name: str | None = None
    """Name in the queue; the last part of the model's path unless given."""
    queues: str = ""
    """More served names, with commas between them: each is a queue of the same model. At each priority the worker takes
    from the queue of its served name first, then from these in their order."""
    engine: str = OWN_ENGINE
    """Name of the engine that computes: headrace, vllm, or one of another installed package."""
    engine_python: str | None = None
    """Interpreter of the engine's process, of an environment that has what the engine needs; None takes this one."""
    engine_args: Json[dict[str, Any]] | None = None
    """Options of another engine by its own names, as JSON: {"gpu_memory_utilization": 0.8}."""
    device: str = "auto"
    dtype: str = "auto"
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Token budget of one step; None means 512 on a CPU, 2048 elsewhere."""
    long_prefill_token_threshold: int = Field(0, ge=0)
    """Most tokens of one prompt in one step; 0 means the whole budget."""
    async_scheduling: bool = False
    """Schedule and launch a step while a GPU computes the one before it."""
    watermark: float = Field(0.01, ge=0, lt=1)
    """Share of the KV blocks that stays free when a request is admitted beside running ones."""
    tool_parser: str = "auto"
    """Format in which the model writes tool calls, for clients that read them: a name, none, or auto: as the chat
    template tells."""
    reasoning_parser: str = "auto"
    """Format in which the model writes its reasoning: a name, none, or auto: as the chat template tells."""
    enable_prefix_caching: bool = True
    share_prefix_cache: bool = False
    """Let requests of one tenant use what the prefix cache holds of another's prompts: faster, and it shows by the
    time and the count of cached tokens which prompts others have sent."""
    max_model_len: int | None = Field(None, ge=1)
    kv_cache_memory: ByteSize | None = None
    """Bytes, or with a unit: 4GiB."""
    kv_cache_dtype: str = "auto"
    """bfloat16: keys and values in half the memory under a float32 model, a little less exact. fp8: cuda only."""
    attention_backend: str = "auto"
    """Kernel of paged attention: auto, native, torch or triton."""
    quantization: str | None = None
    """int8: the decoder's matrix products in 8 bits; faster, a little less exact."""
    enforce_eager: bool = False
    """Without CUDA graphs, for models whose decoding step they cannot hold; slower. Of device cuda only."""
    generation_config: str = Field("vllm", min_length=1)
    """Defaults for what messages do not name. vllm: those of docs/wire.md; auto: the checkpoint's; else a folder's. All
    workers of a queue need the same, so that one continues what another began."""
    override_generation_config: Json[dict[str, Any]] | None = None
    """Defaults that replace those, as JSON: {"temperature": 0.7}."""
    batch_invariant: bool = False
    """Make logits a function of the sequence alone to the last bit, in bfloat16 too; slower."""
    prefill_buckets: Buckets = None
    """This and the next four are for devices with static shapes: see `headrace_engine.static_config`. 128,512"""
    decode_buckets: Buckets = None
    context_buckets: Buckets = None
    tensor_parallel_size: int = Field(1, ge=1)
    compile_cache_dir: str | None = None
    speculative_config: Json[dict[str, Any]] | None = None
    """Speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 4}."""
    logits_processors: str = ""
    """Import paths of `LogitsProcessor` subclasses, package.module:Class, separated by commas."""
    lora_modules: str = ""
    """LoRA adapters that messages may name: name=folder pairs with commas between them."""
    lora_dir: str | None = None
    """A folder whose subfolders are LoRA adapters, each under its own name."""
    max_loras: int = Field(4, ge=1)
    """Most adapters in one batch."""
    max_lora_rank: int = Field(16, ge=1)
    max_cpu_loras: int | None = Field(None, ge=1)
    """Most adapters in memory; None means max_loras, or all named ones where these are more."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint or its tokenizer."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(9464, ge=0, le=65535)
    """0 takes a free port."""
    tenants: str = ""
    """Names, with commas between them, of the tenants with metrics of their own; all others count together."""
    tracing: bool = False
    """Export a trace of each request by OTLP; needs the extra headrace[tracing]."""
    grace_seconds: float = Field(30.0, ge=0)
    """How long running requests may go on after SIGTERM."""
    max_delay_seconds: float = Field(86_400.0, ge=0)
    """A message whose ETA or countdown lies further ahead is refused; a cancellation waits no longer for it."""
    publish_interval: float = Field(0.0, ge=0, le=5)
    """Seconds in which a stream's tokens are gathered into a chunk, all but its first and its last; 0: each step's.

    A cancelled request is stopped at its next chunk.
    """
    max_preemptions: int = Field(3, ge=0)
    """So often a request may be handed back to the queue to make room for requests of better priorities; 0: never."""
    preemption_wait_seconds: float = Field(0.05, ge=0, le=60)
    """For so long a request waits for a free slot of any worker before it preempts another one."""
    stall_seconds: float | None = Field(None, gt=0)
    """An engine that has work and makes no step for so long is killed and started again; None: the engine's own limit,
    or STALL_SECONDS."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    log_json: bool | None = None
    """None: JSON unless the log goes to a terminal."""

    @classmethod
    def from_env(cls) -> "WorkerSettings":
        """Raises WorkerSettingsError, which names every variable that is wrong."""
        try:
            return cls()  # type: ignore[call-arg]  # pydantic-settings fills the fields from the environment
        except ValidationError as error:
            problems = [
                f"HEADRACE_{str(problem['loc'][0]).upper()}: {problem['msg']}"
                + (f", got {problem['input']!r}" if problem["type"] != "missing" else "")
                for problem in error.errors()
            ]
            raise WorkerSettingsError("; ".join(problems)) from error

    @field_validator("queues")
    @classmethod
    def _check_queues(cls, value: str) -> str:
        problems = [problem for name in _names(value) for problem in name_problems("each", name)]
        if problems:
            raise ValueError(problems[0])
        return value

    @field_validator("tool_parser", "reasoning_parser")
    @classmethod
    def _check_formats(cls, value: str, info: ValidationInfo) -> str:
        formats = TOOL_FORMATS if info.field_name == "tool_parser" else REASONING_FORMATS
        if value not in (AUTO, NONE, *formats):
            raise ValueError(f"must be {AUTO}, {NONE} or one of {', '.join(formats)}")
        if value not in (AUTO, NONE) and not go_together(info.data.get("tool_parser"), value):
            raise ValueError(f"must be {HARMONY}, {AUTO} or {NONE} where HEADRACE_TOOL_PARSER is {HARMONY}")
        return value

    @field_validator("tenants")
    @classmethod
    def _check_tenants(cls, value: str) -> str:
        names = _names(value)
        reserved = sorted({OTHER, NO_TENANT} & set(names))
        if reserved:
            raise ValueError(f"{', '.join(reserved)} cannot be the name of a tenant")
        if len(set(names)) != len(names) or len(names) > MAX_TENANTS:
            raise ValueError(f"must be at most {MAX_TENANTS} different names, got {len(names)}")
        return value

    @property
    def tenant_names(self) -> tuple[str, ...]:
        return tuple(_names(self.tenants))

    @property
    def served_name(self) -> str:
        return self.served_model_name or Path(self.model.rstrip("/")).name

    @property
    def served_names(self) -> tuple[str, ...]:
        """All of them, in the order in which their queues are served."""
        return tuple(dict.fromkeys([self.served_name, *_names(self.queues)]))

    def broker(self) -> BrokerSettings:
        try:
            return BrokerSettings.from_env(os.environ)
        except SettingsError as error:
            raise WorkerSettingsError(str(error)) from error

    def adapters(self) -> Adapters:
        """Raises WorkerSettingsError."""
        pairs = [pair.strip() for pair in self.lora_modules.split(",") if pair.strip()]
        modules = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if len(modules) < len(pairs):
            raise WorkerSettingsError(
                "HEADRACE_LORA_MODULES must be name=folder pairs, each name once, with commas between them, "
                f"got {self.lora_modules!r}"
            )
        return Adapters(modules, self.lora_dir)

    def engine_config(self) -> EngineConfig:
        """Fetches the default model where it is asked for. Raises ConfigError, ModelFetchError, WorkerSettingsError."""
        adapters = self.adapters()
        most = self.max_cpu_loras if self.max_cpu_loras is not None else max(self.max_loras, len(adapters.names))
        config = EngineArgs(
            model=str(default_model.resolve(self.model, self.dtype)),
            engine=self.engine,
            engine_python=self.engine_python,
            engine_args=self.engine_args or {},
            device=self.device,
            dtype=self.dtype,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            async_scheduling=self.async_scheduling,
            watermark=self.watermark,
            enable_prefix_caching=self.enable_prefix_caching,
            max_model_len=self.max_model_len,
            kv_cache_memory=int(self.kv_cache_memory) if self.kv_cache_memory is not None else None,
            kv_cache_dtype=self.kv_cache_dtype,
            attention_backend=self.attention_backend,
            quantization=self.quantization,
            enforce_eager=self.enforce_eager,
            generation_config=self.generation_config,
            override_generation_config=self.override_generation_config or {},
            batch_invariant=self.batch_invariant,
            prefill_buckets=self.prefill_buckets,
            decode_buckets=self.decode_buckets,
            context_buckets=self.context_buckets,
            tensor_parallel_size=self.tensor_parallel_size,
            compile_cache_dir=self.compile_cache_dir,
            speculative_config=self._speculative_config(),
            logits_processors=load_logits_processors(
                [path.strip() for path in self.logits_processors.split(",") if path.strip()]
            ),
            trust_remote_code=self.trust_remote_code,
            scheduling_policy="priority",
            enable_lora=adapters.enabled,
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            max_cpu_loras=most,
        ).create_engine_config()
        if config.lora is not None:
            config.lora.preload = adapters.named()
            config.lora.needs_hot_load = self.lora_dir is not None
        return config

    def stall_limit(self) -> float:
        """Seconds without a step after which an engine with work is killed. Raises ConfigError: it is not known."""
        if self.stall_seconds is not None:
            return self.stall_seconds
        own = find_engine(self.engine).stall_seconds
        return STALL_SECONDS if own is None else own

    def step_timeout(self) -> float:
        """Seconds without a step after which a worker with requests is not alive: its own remedy comes first."""
        return max(STEP_TIMEOUT_SECONDS, 2 * self.stall_limit())

    def _speculative_config(self) -> dict[str, Any] | None:
        config = self.speculative_config
        if config is None or not isinstance(config.get("model"), str):
            return config
        return {**config, "model": str(default_model.resolve(config["model"], self.dtype))}
