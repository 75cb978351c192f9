"""Headrace's own engine as the parent sees it: its name, its child module and its options."""

from collections.abc import Iterator

from headrace_engine.config import KV_CACHE_DEVICES, EngineConfig
from headrace_engine.engine_names import OWN_ENGINE
from headrace_engine.engine_options import EngineOptions
from headrace_engine.option import options_of
from headrace_engine.plain_values import shown
from headrace_engine.speculative_config import SpeculativeConfig
from headrace_engine.static_config import StaticConfig


class OwnEngine:
    """The engine of this package."""

    name = OWN_ENGINE
    child_module = "headrace_engine.core.child"
    install_command = "pip install 'headrace[worker]'"
    stall_seconds = None

    def problems(self, args: EngineOptions) -> list[str]:
        return [*_wrong_choices(args), *_wrong_devices(args), *_contradictions(args)]

    def environment(self, _: EngineConfig) -> dict[str, str]:
        return {}


ENGINE = OwnEngine()


def _wrong_choices(args: EngineOptions) -> Iterator[str]:
    for found in options_of(EngineOptions):
        value = getattr(args, found.name)
        if found.choices and value not in found.choices:
            problem = f"{found.name} is {shown(value)}, allowed are {', '.join(map(str, found.choices))}"
            if found.name == "dtype" and str(value).removeprefix("torch.") in ("half", "float16"):
                problem += "; bfloat16 has the size of float16"
            yield problem


def _wrong_devices(args: EngineOptions) -> Iterator[str]:
    for found in options_of(EngineOptions):
        value = getattr(args, found.name)
        if found.devices and args.device not in found.devices and value != found.default:
            yield f"{found.name} {found.elsewhere.format(value=value, device=args.device)}"
    for kept, devices in KV_CACHE_DEVICES.items():
        if args.kv_cache_dtype == kept and args.device not in devices:
            yield f"kv_cache_dtype is {kept}, which device {args.device} cannot do, only {', '.join(devices)}"


def _contradictions(args: EngineOptions) -> Iterator[str]:
    if args.engine_args:
        yield f"engine_args holds {', '.join(args.engine_args)}, but all options of engine {OWN_ENGINE} are named here"
    if args.batch_invariant and args.attention_backend not in ("auto", "native"):
        yield f"batch_invariant needs attention_backend native or auto, not {args.attention_backend}"
    if args.async_scheduling and args.speculative_config is not None:
        yield "async_scheduling and speculative_config exclude each other: drafts follow known tokens"
    if args.batch_invariant and args.enable_lora:
        yield "batch_invariant and enable_lora exclude each other: adapters' products have no fixed shape"
    if args.speculative_config is not None:
        yield from SpeculativeConfig.problems(args.speculative_config)
    yield from StaticConfig.problems(args)
