"""The settings of a worker: environment variables `HEADRACE_*`, with the same names as the command's flags.

The engine declares its own options.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from headrace_broker.errors import SettingsError
from headrace_broker.settings import BrokerSettings
from headrace_engine.checkpoints import default_model
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.options.engine_options import EngineOptions
from headrace_engine.options.engines import find_engine
from headrace_engine.options.logits_processor import load_logits_processors
from headrace_monitoring.labels import MAX_TENANTS, NO_TENANT, OTHER
from headrace_wire import environment
from headrace_wire.option import changed, option, options_of
from headrace_wire.request import name_problems
from headrace_workers.engine_link.adapters import Adapters
from headrace_workers.errors import WorkerSettingsError
from headrace_workers.preparation.answer_formats import (
    AUTO,
    HARMONY,
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    are_compatible,
)
from headrace_workers.preparation.callback_rules import DEFAULT_QUEUE, CallbackRules, queue_problem

STALL_SECONDS = 60.0
"""Default of `stall_seconds` for an engine that has no limit of its own."""
STEP_TIMEOUT_SECONDS = 120.0

NOT_SETTINGS: Final = {
    **dict.fromkeys(
        ("tokenizer", "revision", "tokenizer_revision"), "a worker uses the tokenizer in the model's folder"
    ),
    "skip_tokenizer_init": "a worker tokenises prompts",
    "seed": "each message has its own",
    "max_logprobs": "docs/wire.md sets the limit",
    **dict.fromkeys(("block_size", "num_blocks"), "kv_cache_memory sets the size of the cache"),
    "scheduling_policy": "a worker schedules by the priorities of messages",
    **dict.fromkeys(("max_num_queued_requests", "max_num_queued_tokens"), "requests wait in Redis"),
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "speculative_config sets them"),
    "enable_lora": "lora_modules and lora_dir imply it",
}
"""Engine options that are not settings of a worker, and why."""


@dataclass(kw_only=True)
class WorkerSettings(EngineOptions):
    """The settings of one worker: its model, the options of its engine, and its role in the service.

    `BrokerSettings` reads the broker's settings: `HEADRACE_REDIS_URL`, lease and TTL times.
    """

    generation_config: str = changed(
        EngineOptions,
        "generation_config",
        "vllm",
        "All workers of a queue need the same value, because one may continue another's request.",
    )
    max_loras: int = changed(EngineOptions, "max_loras", 4)
    max_cpu_loras: int | None = changed(
        EngineOptions, "max_cpu_loras", None, "A worker's default is at least the number of lora_modules."
    )
    logits_processors: Sequence[str] = changed(EngineOptions, "logits_processors", ())
    served_model_name: str | None = option(
        None, "Name of the model's queue. None: the last part of the model's path.", metavar="NAME"
    )
    queues: str = option(
        "",
        "Additional served names, separated by commas; each has a queue of its own, for the same model. At each "
        "priority the worker takes from the queue of its served name first, then from these in the given order.",
        metavar="NAME,...",
    )
    tool_parser: str = option(
        AUTO,
        "Format in which the model writes tool calls, for clients that parse them: a name, none, or auto to detect it "
        "in the chat template.",
        metavar="NAME",
    )
    reasoning_parser: str = option(
        AUTO,
        "Format in which the model writes its reasoning: a name, none, or auto to detect it in the chat template.",
        metavar="NAME",
    )
    share_prefix_cache: bool = option(
        False,
        "Let requests of one tenant use prefix cache entries of another. This is faster, but latencies and counts of "
        "cached tokens reveal which prompts other tenants have sent.",
    )
    lora_modules: str = option(
        "", "LoRA adapters that messages may name: name=folder pairs separated by commas.", metavar="NAME=FOLDER,..."
    )
    lora_dir: str | None = option(
        None,
        "A folder whose subfolders are LoRA adapters, served by their folder names; add or remove them at any time.",
        metavar="FOLDER",
    )
    metrics_host: str = option("127.0.0.1", "Address of /metrics and /health.", metavar="HOST")
    metrics_port: int = option(9464, "Port of /metrics; 0 takes a free one.", metavar="PORT", least=0, most=65535)
    tenants: str = option(
        "", "Tenants with metrics of their own, separated by commas; all others are counted together.", metavar="A,B"
    )
    pod_deletion_cost: bool = option(
        False,
        "In Kubernetes: write the tokens of the running requests as the deletion cost of the worker's own pod, so that "
        "scaling down removes idle pods first. The pod's service account must have the right to patch pods.",
    )
    tracing: bool = option(False, "Export a trace of each request over OTLP; needs the extra headrace[tracing].")
    grace_seconds: float = option(30.0, "How long running requests may continue after SIGTERM.", metavar="S", least=0)
    max_delay_seconds: float = option(
        86_400.0,
        "Maximum delay of a message (ETA or countdown); longer ones are refused. A cancellation expires after a day.",
        metavar="S",
        least=0,
    )
    publish_interval: float = option(
        0.0,
        "Seconds for which a stream's tokens are collected into one chunk, except for its first and last chunk; 0: one "
        "chunk per step. A cancelled request stops at its next chunk.",
        metavar="S",
        least=0,
        most=5,
    )
    fetch_quantum: int = option(
        4,
        "How many choices are taken from the queue before the engine begins a step with them. A low number divides a "
        "burst among all workers. As many as ended with the last step may be taken besides, up to three times the "
        "number. A worker that is the only one of its queues takes eight times as many.",
        metavar="N",
        least=1,
    )
    max_preemptions: int = option(
        3,
        "How often a request may be returned to the queue to make room for requests of higher priority; 0: never.",
        metavar="N",
        least=0,
    )
    preemption_wait_seconds: float = option(
        0.05,
        "How long a request waits for a free slot of any worker before it preempts another request.",
        metavar="S",
        least=0,
        most=60,
    )
    stall_seconds: float | None = option(
        None,
        "An engine that has work but makes no step for this long is killed and restarted. None: the engine's own "
        f"limit, or {STALL_SECONDS:g}.",
        metavar="S",
        above=0,
    )
    callback_tasks: str = option(
        "",
        "Tasks that links, chains and chords of messages may start: names or patterns such as shop.*, separated by "
        "commas. Empty: messages with links are refused.",
        metavar="NAME,...",
    )
    callback_queues: str = option(
        DEFAULT_QUEUE,
        "Queues to which callbacks may be sent, separated by commas. Those that name no queue go to the first one.",
        metavar="NAME,...",
    )
    log_level: str = option("INFO", "Minimum log level.", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    log_json: bool | None = option(None, "Log one JSON object per line. None: if the log does not go to a terminal.")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the settings. Raises WorkerSettingsError, which names every invalid variable."""
        values, problems = environment.read(SETTINGS, environ)
        if "model" not in values:
            problems.append("HEADRACE_MODEL must be a model folder or a hub name, and is not set")
        settings = cls(**values)
        problems += settings._invalid_names()
        if problems:
            raise WorkerSettingsError("; ".join(problems))
        return settings

    def _invalid_names(self) -> Iterator[str]:
        """Return a sentence for each setting with an invalid name."""
        for name in environment.names(self.queues):
            yield from name_problems("HEADRACE_QUEUES", name)
        for setting, formats in (("tool_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
            value = getattr(self, setting)
            if value not in (AUTO, NONE, *formats):
                yield f"HEADRACE_{setting.upper()} must be {AUTO}, {NONE} or one of {', '.join(formats)}, got {value!r}"
        if self.reasoning_parser in REASONING_FORMATS and not are_compatible(self.tool_parser, self.reasoning_parser):
            allowed = f"{HARMONY}, {AUTO} or {NONE} if HEADRACE_TOOL_PARSER is {HARMONY}"
            yield f"HEADRACE_REASONING_PARSER must be {allowed}, got {self.reasoning_parser!r}"
        queues = environment.names(self.callback_queues)
        if not queues:
            yield "HEADRACE_CALLBACK_QUEUES must name at least one queue"
        yield from (
            f"a queue of HEADRACE_CALLBACK_QUEUES {problem}" for problem in filter(None, map(queue_problem, queues))
        )
        tenants = self.tenant_names
        reserved = sorted({OTHER, NO_TENANT} & set(tenants))
        if reserved:
            yield f"HEADRACE_TENANTS must not name {' and '.join(reserved)}, got {self.tenants!r}"
        if len(set(tenants)) != len(tenants) or len(tenants) > MAX_TENANTS:
            yield f"HEADRACE_TENANTS must be at most {MAX_TENANTS} different names, got {len(tenants)}"

    @property
    def tenant_names(self) -> tuple[str, ...]:
        return tuple(environment.names(self.tenants))

    @property
    def callback_rules(self) -> CallbackRules:
        return CallbackRules(
            tuple(environment.names(self.callback_tasks)), tuple(environment.names(self.callback_queues))
        )

    @property
    def served_name(self) -> str:
        return self.served_model_name or Path(self.model.rstrip("/")).name

    @property
    def served_names(self) -> tuple[str, ...]:
        """All served names, in the order in which their queues are served."""
        return tuple(dict.fromkeys([self.served_name, *environment.names(self.queues)]))

    def broker(self) -> BrokerSettings:
        try:
            return BrokerSettings.from_env(os.environ)
        except SettingsError as error:
            raise WorkerSettingsError(str(error)) from error

    def adapters(self) -> Adapters:
        """Return the LoRA adapters. Raises WorkerSettingsError."""
        pairs = environment.names(self.lora_modules)
        modules = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if len(modules) < len(pairs):
            raise WorkerSettingsError(
                "HEADRACE_LORA_MODULES must be name=folder pairs, each name once, separated by commas, "
                f"got {self.lora_modules!r}"
            )
        return Adapters(modules, self.lora_dir)

    def engine_config(self) -> EngineConfig:
        """Return the engine's config; may fetch the model. Raises ConfigError, ModelFetchError, WorkerSettingsError."""
        adapters = self.adapters()
        most = self.max_cpu_loras if self.max_cpu_loras is not None else max(self.max_loras, len(adapters.names))
        options: dict[str, Any] = {found.name: getattr(self, found.name) for found in options_of(EngineOptions)}
        options |= {
            "model": str(default_model.resolve(self.model, self.dtype, self.engine_python)),
            "speculative_config": self._speculative_config(),
            "logits_processors": load_logits_processors(self.logits_processors),
            "scheduling_policy": "priority",
            "enable_lora": adapters.enabled,
            "max_cpu_loras": most,
        }
        config = EngineArgs(**options).create_engine_config()
        if config.lora is not None:
            config.lora.preload = adapters.named()
            config.lora.needs_hot_load = self.lora_dir is not None
        return config

    def stall_limit(self) -> float:
        """Return the seconds without a step after which an engine with work is killed. Raises ConfigError."""
        own = self.stall_seconds if self.stall_seconds is not None else find_engine(self.engine).stall_seconds
        return STALL_SECONDS if own is None else own

    def step_timeout(self) -> float:
        """Return the seconds without a step after which a worker with requests fails its liveness probe."""
        return max(STEP_TIMEOUT_SECONDS, 2 * self.stall_limit())

    def _speculative_config(self) -> Mapping[str, Any] | None:
        config = self.speculative_config
        if config is None or not isinstance(config.get("model"), str):
            return config
        return {**config, "model": str(default_model.resolve(config["model"], self.dtype, self.engine_python))}


SETTINGS: Final = tuple(found for found in options_of(WorkerSettings) if found.name not in NOT_SETTINGS)
"""All settings of a worker, in the order of the reference."""
QUEUE_SETTINGS: Final = tuple(found for found in options_of(BrokerSettings) if found.name != "max_queued_requests")
"""The settings of the queue that a worker reads. Clients alone read max_queued_requests."""
