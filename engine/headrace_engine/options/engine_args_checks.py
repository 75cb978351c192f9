"""Checks of engine options that hold for every engine: types, lower bounds, defaults of sampling parameters."""

import json
from collections.abc import Mapping
from typing import Final

from headrace_engine.errors import ConfigError, InvalidRequestError
from headrace_engine.options.config import FITTING_LENGTH, OWN_ENGINE
from headrace_engine.options.engine_options import EngineOptions
from headrace_engine.options.engines import find_engine
from headrace_engine.plain_values import shown
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.system import interpreter
from headrace_wire.option import options_of

GENERATION_DEFAULTS: Final = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Settings of a generation config that are used, as in vLLM (ModelConfig.get_diff_sampling_param): transformers' names
-> names of `SamplingParams`."""
_CHECKED_BELOW: Final = ("model", "generation_config")
"""Texts that are checked separately, with messages of their own."""


def problems_of(args: EngineOptions) -> list[str]:
    """Return all problems of normalised options, both for any engine and for the engine that the options name."""
    wrong_types = _wrong_types(args)
    problems = [*_wrong_bounds(args), *wrong_types]
    if not problems and args.max_cpu_loras is not None and args.max_cpu_loras < args.max_loras:
        problems.append(f"max_cpu_loras must be at least {args.max_loras}, max_loras, got {args.max_cpu_loras}")
    if args.model in ("", None):
        problems.append(f"model must be a model folder or a hub name, got {shown(args.model)}")
    is_elsewhere = args.engine != OWN_ENGINE or args.engine_python is not None
    if is_elsewhere and getattr(args, "core_in_process", False):
        problems.append("core_in_process is set, but another engine or interpreter runs in a process of its own")
    if wrong_types:
        return problems
    problems += _wrong_generation_defaults(args)
    try:
        problems += find_engine(args.engine).problems(args)
        if args.engine_python is not None and interpreter.is_other(args.engine_python):
            interpreter.check(args.engine_python)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def _wrong_types(args: EngineOptions) -> list[str]:
    """Return the problems of options with a wrong type."""
    problems = []
    model: object = args.model
    if model is not None and not isinstance(model, str):
        problems.append(f"model must be a model folder or a hub name, got {shown(model)}")
    for found in options_of(EngineOptions):
        name, value = found.name, getattr(args, found.name)
        if found.kind is bool and not isinstance(value, bool):
            problems.append(f"{name} must be true or false, got {shown(value)}")
        # Headrace's own engine checks texts with choices itself
        is_text = found.kind is str and name not in _CHECKED_BELOW and (not found.choices or args.engine != OWN_ENGINE)
        if is_text and value is not None and (not isinstance(value, str) or not value):
            problems.append(f"{name} must be text that is not empty, got {shown(value)}")
    if args.seed is not None and (type(args.seed) is not int or not -(2**63) <= args.seed < 2**63):
        problems.append(f"seed must be an integer of 64 bits, got {shown(args.seed)}")
    if not isinstance(args.logits_processors, list | tuple):
        problems.append(f"logits_processors must be a list of import paths, got {shown(args.logits_processors)}")
    else:
        problems += [
            f"logits_processors must be import paths or subclasses of LogitsProcessor, got {shown(processor)}"
            for processor in args.logits_processors
            if not isinstance(processor, str | type)
        ]
    engine_args: object = args.engine_args
    if not isinstance(engine_args, Mapping) or not _is_json(engine_args):
        problems.append(f"engine_args must be a map of JSON's values, got {shown(engine_args)}")
    drafts: object = args.speculative_config
    if args.engine != OWN_ENGINE and drafts is not None and not (isinstance(drafts, Mapping) and _is_json(drafts)):
        problems.append(f"speculative_config must be a map of JSON's values, got {shown(drafts)}")
    return problems


def _is_json(values: Mapping[object, object]) -> bool:
    try:
        json.dumps(dict(values))
    except (TypeError, ValueError, RecursionError):
        return False
    return all(isinstance(name, str) for name in values)


def _wrong_bounds(args: EngineOptions) -> list[str]:
    problems = []
    if args.scheduling_policy not in ("fcfs", "priority"):
        problems.append(f"scheduling_policy must be one of fcfs, priority, got {shown(args.scheduling_policy)}")
    problems += [
        f"{found.name} {found.limits}, got {shown(value)}"
        for found in options_of(EngineOptions)
        if not found.allows(value := getattr(args, found.name))
        if (found.name, value) != ("max_model_len", FITTING_LENGTH)
    ]
    return problems


def _wrong_generation_defaults(args: EngineOptions) -> list[str]:
    problems = []
    if not isinstance(args.generation_config, str) or not args.generation_config:
        problems.append(f"generation_config must be auto, vllm or a folder, got {args.generation_config!r}")
    override: object = args.override_generation_config
    if not isinstance(override, Mapping):
        return [*problems, "override_generation_config must be a map"]
    for name, value in override.items():
        parameter = GENERATION_DEFAULTS.get(name)
        if parameter is None:
            allowed = ", ".join(GENERATION_DEFAULTS)
            problems.append(f"names of override_generation_config must be of {allowed}, got {name!r}")
            continue
        try:
            SamplingParams(**{parameter: value})
        except InvalidRequestError as error:
            problems.append(f"override_generation_config: {error}")
    return problems
