"""Headrace's own engine as the parent sees it: its name, its child module and its options."""

from collections.abc import Iterator
from typing import Final

from headrace_engine.config import EngineConfig
from headrace_engine.engine_names import OWN_ENGINE
from headrace_engine.engine_options import EngineOptions
from headrace_engine.plain_values import shown
from headrace_engine.speculative_config import SpeculativeConfig
from headrace_engine.static_config import STATIC_DEVICES, StaticConfig

DEVICES = ("auto", "cpu", "cuda", *STATIC_DEVICES)
DTYPES = ("auto", "float32", "bfloat16")
_GRAPHLESS_DEVICES = ("auto", "cpu", "cuda", "static-cpu")
_KV_CACHE_DEVICES = {"bfloat16": ("auto", "cpu", "cuda"), "fp8": ("cuda",)}
_CHOICES: Final = {
    "dtype": DTYPES,
    "device": DEVICES,
    "kv_cache_dtype": ("auto", *_KV_CACHE_DEVICES),
    "attention_backend": ("auto", "native", "torch", "triton"),
    "quantization": (None, "int8"),
}


class OwnEngine:
    """The engine of this package."""

    name = OWN_ENGINE
    child_module = "headrace_engine.core.child"
    install_command = "pip install 'headrace[worker]'"
    stall_seconds = None

    def problems(self, args: EngineOptions) -> list[str]:
        return [*_wrong_choices(args), *_contradictions(args)]

    def environment(self, _: EngineConfig) -> dict[str, str]:
        return {}


ENGINE = OwnEngine()


def _wrong_choices(args: EngineOptions) -> Iterator[str]:
    for name, allowed in _CHOICES.items():
        value = getattr(args, name)
        if value not in allowed:
            problem = f"{name} is {shown(value)}, allowed are {', '.join(map(str, allowed))}"
            if name == "dtype" and str(value).removeprefix("torch.") in ("half", "float16"):
                problem += "; bfloat16 has the size of float16"
            yield problem


def _contradictions(args: EngineOptions) -> Iterator[str]:
    device = args.device
    if args.engine_args:
        yield f"engine_args holds {', '.join(args.engine_args)}, but all options of engine {OWN_ENGINE} are named here"
    if args.batch_invariant and args.attention_backend not in ("auto", "native"):
        yield f"batch_invariant needs attention_backend native or auto, not {args.attention_backend}"
    if args.quantization is not None and device not in ("auto", "cpu"):
        yield f"quantization is set, which device {device} cannot do"
    for kept, devices in _KV_CACHE_DEVICES.items():
        if args.kv_cache_dtype == kept and device not in devices:
            yield f"kv_cache_dtype is {kept}, which device {device} cannot do, only {', '.join(devices)}"
    if args.async_scheduling and device != "cuda":
        yield f"async_scheduling is set, but only device cuda launches steps ahead, not {device}"
    if args.async_scheduling and args.speculative_config is not None:
        yield "async_scheduling and speculative_config exclude each other: drafts follow known tokens"
    if args.enforce_eager and device not in _GRAPHLESS_DEVICES:
        yield f"enforce_eager is set, but device {device} computes nothing that is not compiled"
    if args.batch_invariant and args.enable_lora:
        yield "batch_invariant and enable_lora exclude each other: adapters' products have no fixed shape"
    if args.speculative_config is not None:
        yield from SpeculativeConfig.problems(args.speculative_config)
    yield from StaticConfig.problems(args, device)
