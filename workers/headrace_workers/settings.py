"""What an operator sets on a worker: environment variables `HEADRACE_*`, of the same names as the CLI's flags.

The options of the engine are declared in the engine.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from headrace_broker.errors import SettingsError
from headrace_broker.messages import name_problems
from headrace_broker.settings import BrokerSettings
from headrace_engine import default_model
from headrace_engine.config import EngineConfig
from headrace_engine.engine_args import EngineArgs
from headrace_engine.engine_options import EngineOptions
from headrace_engine.engines import find_engine
from headrace_engine.logits_processor import load_logits_processors
from headrace_engine.option import changed, option, options_of
from headrace_monitoring.labels import MAX_TENANTS, NO_TENANT, OTHER
from headrace_workers import environment
from headrace_workers.adapters import Adapters
from headrace_workers.answer_formats import AUTO, HARMONY, NONE, REASONING_FORMATS, TOOL_FORMATS, go_together
from headrace_workers.errors import WorkerSettingsError

STALL_SECONDS = 60.0
"""Of an engine that names no limit of its own."""
STEP_TIMEOUT_SECONDS = 120.0

NOT_SETTINGS: Final = {
    **dict.fromkeys(
        ("tokenizer", "revision", "tokenizer_revision"),
        "the preparation lanes read the tokenizer of the model's folder",
    ),
    "skip_tokenizer_init": "a worker tokenises prompts",
    "seed": "a message carries its own",
    "max_logprobs": "docs/wire.md has the limit",
    **dict.fromkeys(("block_size", "num_blocks"), "kv_cache_memory says how much memory the cache takes"),
    "scheduling_policy": "messages have priorities",
    **dict.fromkeys(("max_num_queued_requests", "max_num_queued_tokens"), "requests wait in the queue"),
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "speculative_config has the same"),
    "enable_lora": "follows from lora_modules and lora_dir",
}
"""Options of the engine that are no settings of a worker, and why."""


@dataclass(kw_only=True)
class WorkerSettings(EngineOptions):
    """One worker: its model, its engine's options, its place in the service.

    The broker's own settings (`HEADRACE_REDIS_URL`, lease and TTL times) are read by `BrokerSettings`.
    """

    generation_config: str = changed(
        EngineOptions,
        "generation_config",
        "vllm",
        "All workers of a queue need the same, so that one continues what another began.",
    )
    max_loras: int = changed(EngineOptions, "max_loras", 4)
    max_cpu_loras: int | None = changed(
        EngineOptions, "max_cpu_loras", None, "A worker takes all named ones where these are more."
    )
    logits_processors: Sequence[str] = changed(EngineOptions, "logits_processors", ())
    served_model_name: str | None = option(
        None, "Name in the queue. None: the last part of the model's path.", metavar="NAME"
    )
    queues: str = option(
        "",
        "More served names, with commas between them: each is a queue of the same model. At each priority the worker "
        "takes from the queue of its served name first, then from these in their order.",
        metavar="NAME,...",
    )
    tool_parser: str = option(
        AUTO,
        "Format in which the model writes tool calls, for clients that read them: a name, none, or auto: as the chat "
        "template tells.",
        metavar="NAME",
    )
    reasoning_parser: str = option(
        AUTO,
        "Format in which the model writes its reasoning: a name, none, or auto: as the chat template tells.",
        metavar="NAME",
    )
    share_prefix_cache: bool = option(
        False,
        "Let requests of one tenant use what the prefix cache holds of another's prompts: faster, and it shows by the "
        "time and the count of cached tokens which prompts others have sent.",
    )
    lora_modules: str = option(
        "",
        "LoRA adapters that messages may name: name=folder pairs with commas between them.",
        metavar="NAME=FOLDER,...",
    )
    lora_dir: str | None = option(
        None,
        "A folder whose subfolders are LoRA adapters, each under its own name; they may come and go.",
        metavar="FOLDER",
    )
    metrics_host: str = option("127.0.0.1", "Address of metrics and health.", metavar="HOST")
    metrics_port: int = option(9464, "Its port; 0 takes a free one.", metavar="PORT", least=0, most=65535)
    tenants: str = option(
        "",
        "Names, with commas between them, of the tenants with metrics of their own; all others count together.",
        metavar="A,B",
    )
    tracing: bool = option(False, "Export a trace of each request by OTLP; needs the extra headrace[tracing].")
    grace_seconds: float = option(30.0, "How long running requests may go on after SIGTERM.", metavar="S", least=0)
    max_delay_seconds: float = option(
        86_400.0,
        "A message whose ETA or countdown lies further ahead is refused; a cancellation waits no longer for it.",
        metavar="S",
        least=0,
    )
    publish_interval: float = option(
        0.0,
        "Seconds in which a stream's tokens are gathered into a chunk, all but its first and its last; 0: each step's. "
        "A cancelled request is stopped at its next chunk.",
        metavar="S",
        least=0,
        most=5,
    )
    max_preemptions: int = option(
        3,
        "So often a request may be handed back to the queue to make room for requests of better priorities; 0: never.",
        metavar="N",
        least=0,
    )
    preemption_wait_seconds: float = option(
        0.05,
        "For so long a request waits for a free slot of any worker before it preempts another one.",
        metavar="S",
        least=0,
        most=60,
    )
    stall_seconds: float | None = option(
        None,
        "An engine that has work and makes no step for so long is killed and started again. None: the engine's own "
        f"limit, or {STALL_SECONDS:g}.",
        metavar="S",
        above=0,
    )
    log_level: str = option("INFO", "Least level.", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    log_json: bool | None = option(None, "One JSON object a line. None: unless the log goes to a terminal.")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Raises WorkerSettingsError, which names every variable that is wrong."""
        values, problems = environment.read(SETTINGS, environ)
        if "model" not in values:
            problems.append("HEADRACE_MODEL: must be a model folder or a hub name, and is not set")
        settings = cls(**values)
        problems += [f"HEADRACE_{name.upper()}: {problem}" for name, problem in settings._wrong_names()]
        if problems:
            raise WorkerSettingsError("; ".join(problems))
        return settings

    def _wrong_names(self) -> Iterator[tuple[str, str]]:
        """Return (setting, problem) for each that names something wrong."""
        for name in environment.names(self.queues):
            yield from (("queues", problem) for problem in name_problems("each", name))
        for setting, value, formats in (
            ("tool_parser", self.tool_parser, TOOL_FORMATS),
            ("reasoning_parser", self.reasoning_parser, REASONING_FORMATS),
        ):
            if value not in (AUTO, NONE, *formats):
                yield setting, f"must be {AUTO}, {NONE} or one of {', '.join(formats)}, got {value!r}"
        if self.reasoning_parser in REASONING_FORMATS and not go_together(self.tool_parser, self.reasoning_parser):
            allowed = f"{HARMONY}, {AUTO} or {NONE} where HEADRACE_TOOL_PARSER is {HARMONY}"
            yield "reasoning_parser", f"must be {allowed}, got {self.reasoning_parser!r}"
        tenants = self.tenant_names
        reserved = sorted({OTHER, NO_TENANT} & set(tenants))
        if reserved:
            yield "tenants", f"{', '.join(reserved)} cannot be the name of a tenant, got {self.tenants!r}"
        if len(set(tenants)) != len(tenants) or len(tenants) > MAX_TENANTS:
            yield "tenants", f"must be at most {MAX_TENANTS} different names, got {len(tenants)}"

    @property
    def tenant_names(self) -> tuple[str, ...]:
        return tuple(environment.names(self.tenants))

    @property
    def served_name(self) -> str:
        return self.served_model_name or Path(self.model.rstrip("/")).name

    @property
    def served_names(self) -> tuple[str, ...]:
        """All of them, in the order in which their queues are served."""
        return tuple(dict.fromkeys([self.served_name, *environment.names(self.queues)]))

    def broker(self) -> BrokerSettings:
        try:
            return BrokerSettings.from_env(os.environ)
        except SettingsError as error:
            raise WorkerSettingsError(str(error)) from error

    def adapters(self) -> Adapters:
        """Raises WorkerSettingsError."""
        pairs = environment.names(self.lora_modules)
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
        options: dict[str, Any] = {found.name: getattr(self, found.name) for found in options_of(EngineOptions)}
        options |= {
            "model": str(default_model.resolve(self.model, self.dtype)),
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
        """Seconds without a step after which an engine with work is killed. Raises ConfigError: it is not known."""
        if self.stall_seconds is not None:
            return self.stall_seconds
        own = find_engine(self.engine).stall_seconds
        return STALL_SECONDS if own is None else own

    def step_timeout(self) -> float:
        """Seconds without a step after which a worker with requests is not alive: its own remedy comes first."""
        return max(STEP_TIMEOUT_SECONDS, 2 * self.stall_limit())

    def _speculative_config(self) -> Mapping[str, Any] | None:
        config = self.speculative_config
        if config is None or not isinstance(config.get("model"), str):
            return config
        return {**config, "model": str(default_model.resolve(config["model"], self.dtype))}


SETTINGS: Final = tuple(found for found in options_of(WorkerSettings) if found.name not in NOT_SETTINGS)
"""All settings of a worker, in the order in which they are listed."""
