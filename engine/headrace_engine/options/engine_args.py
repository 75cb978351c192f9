"""`EngineArgs`: the engine options that users write, checked and turned into an `EngineConfig`.

The checks are in `engine_args_checks` and in `Engine.problems` of the engine that will run. Imports no torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from headrace_engine.errors import ConfigError
from headrace_engine.options.config import (
    OWN_ENGINE,
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
)
from headrace_engine.options.devices import DEVICES
from headrace_engine.options.engine_args_checks import problems_of
from headrace_engine.options.engine_options import EngineOptions
from headrace_engine.options.logits_processor import import_path
from headrace_engine.options.speculative_config import SpeculativeConfig
from headrace_engine.options.static_config import StaticConfig
from headrace_engine.plain_values import plain_list, shown
from headrace_engine.vllm_names import RENAMED, with_vllm_names
from headrace_wire.option import options_of
from headrace_wire.values import plain

T = TypeVar("T")

_DTYPE_NAMES = {"float": "float32", "float32": "float32", "bfloat16": "bfloat16"}


@with_vllm_names("EngineArgs", lambda problems: ConfigError("; ".join(problems)))
@dataclass(kw_only=True)
class EngineArgs(EngineOptions):
    """The engine options in one flat list, named as in vLLM (docs/vllm.md).

    Raises:
        ConfigError: an option is unknown or not supported. `create_engine_config` names every option that is wrong.
    """

    def _normalised(self) -> "EngineArgs":
        """Return a copy with Headrace's names only, and with each value in its canonical form.

        Raises:
            ConfigError: two names of one option have different values.
        """
        values = {f.name: plain_list(getattr(self, f.name)) for f in fields(self)}
        for theirs, ours in RENAMED.items():
            given, values[theirs] = values[theirs], None
            if given is None:
                continue
            if values[ours] not in (None, given):
                raise ConfigError(f"{theirs} is {shown(given)} and {ours} is {shown(values[ours])}: give one of them")
            values[ours] = given
        for found in options_of(EngineOptions):
            value = values[found.name]
            if value is None and found.none_is_default:
                values[found.name] = found.default
            elif isinstance(value, os.PathLike):
                values[found.name] = os.fspath(value)
        dtype = str(values["dtype"]).removeprefix("torch.")
        values["dtype"] = _DTYPE_NAMES.get(dtype, values["dtype"] if values["engine"] == OWN_ENGINE else dtype)
        values["engine_args"] = plain(values["engine_args"])
        values["override_generation_config"] = plain(values["override_generation_config"])
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
        return max(DEVICES[self.device].token_budget, self.max_num_seqs)

    def _pooling_budget(self) -> dict[str, int]:
        given = self.max_num_batched_tokens
        if given is None and self.engine == OWN_ENGINE:
            given = DEVICES[self.device].pooling_token_budget
        return {} if given is None else {"max_pooling_tokens": given}

    def create_engine_config(self) -> EngineConfig:
        return self._normalised()._create_engine_config()

    def _create_engine_config(self) -> EngineConfig:
        problems = problems_of(self)
        if problems:
            raise ConfigError("; ".join(problems))
        is_own, drafts = self.engine == OWN_ENGINE, self.speculative_config
        most = self.max_cpu_loras if self.max_cpu_loras is not None else self.max_loras
        return EngineConfig(
            model=self._topic(
                ModelConfig, logits_processors=[import_path(processor) for processor in self.logits_processors]
            ),
            cache=self._topic(CacheConfig),
            scheduler=self._topic(
                SchedulerConfig,
                max_num_batched_tokens=self._token_budget(),
                policy=self.scheduling_policy,
                **self._pooling_budget(),
            ),
            speculative=SpeculativeConfig.from_map(drafts) if drafts is not None and is_own else None,
            speculative_options=dict(drafts) if drafts is not None and not is_own else None,
            lora=self._topic(LoRAConfig, max_cpu_loras=most) if self.enable_lora else None,
            static=self._topic(StaticConfig),
            engine=self.engine,
            engine_python=self.engine_python,
            engine_args=dict(self.engine_args),
        )

    def _topic(self, kind: type[T], **more: Any) -> T:
        """Build the dataclass of one topic from the options. `more` has its fields that are not options."""
        return kind(**{found.name: getattr(self, found.name) for found in options_of(kind)}, **more)


@with_vllm_names("EngineArgs", lambda problems: ConfigError("; ".join(problems)))
@dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """Options of `AsyncLLMEngine`."""

    core_in_process: bool = False
    """Run the core in a thread of this process instead of in a child process."""
