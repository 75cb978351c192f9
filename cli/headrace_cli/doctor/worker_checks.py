"""Checks of what a worker needs: kernels for the processor, a device, and a model that fits. Imports torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import redis
import torch

from headrace_broker.server.connections import connect
from headrace_broker.server.rights import refused_lists
from headrace_broker.settings import BrokerSettings
from headrace_cli.doctor.finding import Finding, sentence
from headrace_cli.doctor.machine_checks import check_disk, check_port
from headrace_engine.checkpoints import default_model
from headrace_engine.checkpoints.pooling_folder import read_pooling_spec
from headrace_engine.checkpoints.weight_files import check_weight_files
from headrace_engine.errors import HeadraceEngineError
from headrace_engine.options.config import OWN_ENGINE, EngineConfig
from headrace_engine.runner.cuda.device import find_device
from headrace_engine.runner.linear import packed_linear
from headrace_engine.runner.memory import available_memory
from headrace_engine.runner.models import loading, weight_memory
from headrace_engine.runner.models.load_plan import plan_load
from headrace_engine.runner.native import native_library, precompiled
from headrace_engine.runner.native.kernel_source import source_text
from headrace_engine.runner.pooling.pooling_loading import read_config
from headrace_engine.system import control_group
from headrace_engine.system.private_folder import cache_folder
from headrace_workers.errors import HeadraceWorkerError
from headrace_workers.settings import WorkerSettings

_INSTRUCTIONS: Final = (
    ("amx_bf16", "AMX", "matrix tiles for bfloat16"),
    ("avx512_bf16", "AVX512-BF16", "pairs of bfloat16"),
    ("avx512_vnni", "AVX512-VNNI", "packed weights by dot products of bytes"),
    ("avx512_f", "AVX-512", "vectors of 16 numbers"),
    ("avx_vnni", "AVX-VNNI", "packed weights by dot products of bytes"),
    ("avx2", "AVX2", "vectors of 8 numbers"),
)
"""By torch's names: what each gives the kernels."""
_SLOWER: Final = "a processor with AVX2, better AVX-512, is many times as fast"


def check_worker(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check this machine for a worker with these environment variables."""
    try:
        settings = WorkerSettings.from_env({"HEADRACE_MODEL": default_model.NAME, **environ})
    except (HeadraceWorkerError, HeadraceEngineError) as error:
        yield Finding("settings", "failed", sentence(error), "correct the variable (docs/reference/settings.md)")
        return
    yield check_processor(torch.cpu.get_capabilities())
    yield check_kernels()
    yield from _check_device(settings.device)
    yield from _check_model(settings)
    yield from _check_callbacks(settings, environ)
    yield check_disk(cache_folder(environ), "compiled kernels and the default model")
    yield check_port(settings.metrics_host, settings.metrics_port, "--metrics-port")


def _check_callbacks(settings: WorkerSettings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the worker may push to the queues of callbacks, if it may start any."""
    rules = settings.callback_rules
    if not rules.tasks:
        return
    try:
        with connect(BrokerSettings.from_env(environ).redis_url) as client:
            refused = refused_lists(client, rules.queues)
    except redis.RedisError:
        return  # the checks of Redis have named it
    if refused:
        text = f"The worker's user may not run LPUSH on the queues of callbacks {', '.join(refused)}."
        yield Finding("callbacks", "failed", text, f"add ~{refused[0]}* to its rules (docs/canvas.md)")
    else:
        yield Finding("callbacks", "ok", f"Callbacks may be sent to {', '.join(rules.queues)}.")


def check_processor(capabilities: Mapping[str, object]) -> Finding:
    """Check the instructions of the processor. `capabilities` are those that torch finds."""
    cores = control_group.usable_cores()
    machine = f"The processor ({capabilities.get('architecture')}, {cores} core{'s' * (cores > 1)})"
    if capabilities.get("architecture") == "aarch64":
        return Finding("processor", "ok", f"{machine} has NEON: vectors of 4 numbers.")
    found = [f"{name} ({gives})" for key, name, gives in _INSTRUCTIONS if capabilities.get(key)]
    if not capabilities.get("avx2"):
        return Finding("processor", "warning", f"{machine} has no AVX2: torch computes the products.", _SLOWER)
    return Finding("processor", "ok", f"{machine} has {', '.join(found)}.")


def check_kernels() -> Finding:
    """Check that the kernels can be had: built by this machine's compiler, or precompiled."""
    compiler = native_library.find_compiler()
    remedy = "install one, such as gcc and libc6-dev, or name one by the variable CC"
    problem = "There is no C compiler (tried $CC, then cc)."
    if compiler is not None:
        try:
            native_library.check_compiler(compiler)
            return Finding("compiler", "ok", f"{compiler} builds the kernels for this processor, once.")
        except OSError as error:
            problem = sentence(f"The C compiler does not work: {error}")
    name = "linear.c"  # a release has either all kernels of a variant or none
    library = precompiled.find(name, source_text("headrace_engine.runner.linear", name))
    if library is not None:
        return Finding("compiler", "ok", f"{problem} The precompiled kernels of {library.parent.name} are used.")
    return Finding("compiler", "failed", f"{problem} Without kernels torch computes, several times as slowly.", remedy)


def _check_device(device: str) -> Iterator[Finding]:
    if device == "cuda":
        try:
            gpu = find_device()
        except HeadraceEngineError as error:
            yield Finding(
                "gpu", "failed", sentence(error), "install the driver and a torch with CUDA, or set --device cpu"
            )
            return
        free, total = torch.cuda.mem_get_info(gpu)
        name = torch.cuda.get_device_name(gpu)
        yield Finding("gpu", "ok", f"{name} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free.")
    elif device in ("auto", "cpu") and Path("/dev/nvidiactl").exists():
        text = f"This machine has a GPU, and device {device} computes on the processor."
        yield Finding("gpu", "warning", text, "set --device cuda to use it (docs/gpu.md)")
    else:
        yield Finding("gpu", "ok", f"Device {device} needs no GPU.")


def _check_model(settings: WorkerSettings) -> Iterator[Finding]:
    if settings.model == default_model.NAME and default_model.find(settings.dtype) is None:
        text = f"The default model {settings.model} is fetched at the first start: 93 MB, and 270 MB of disk."
        yield Finding("model", "ok", text)
        return
    try:
        config = settings.engine_config()
        if config.engine != OWN_ENGINE:
            yield Finding("model", "ok", f"The engine {config.engine} checks its model itself.")
            return
        check_weight_files(config.model.model)
        needed = _weight_bytes(config)
    except (HeadraceEngineError, HeadraceWorkerError, OSError, MemoryError) as error:
        yield Finding("model", "failed", sentence(error), "correct --model or its options (docs/workers.md)")
        return
    yield _check_memory(config, needed)


def _weight_bytes(config: EngineConfig) -> int:
    """Return the bytes of the weights. Raises ModelLoadError or ConfigError, as the worker does when it loads them."""
    on_gpu = config.model.device == "cuda"
    spec = read_pooling_spec(config.model.model)
    if spec is not None:
        hf_config = read_config(config.model, spec)
        computes_bfloat16 = on_gpu or packed_linear.computes_bfloat16()
        dtype = loading.resolve_dtype(config.model, hf_config, computes_bfloat16=computes_bfloat16)
        return weight_memory.check_weights_fit(spec.folder, dtype)
    return plan_load(config.model, packed=not on_gpu, device=torch.device("cuda" if on_gpu else "cpu")).weight_bytes


def _check_memory(config: EngineConfig, needed: int) -> Finding:
    weights, left = needed / 2**30, (available_memory() - needed) / 2**30
    text = f"The weights of {config.model.model} take {weights:.2f} GiB, which leaves {left:.1f} GiB of memory"
    wanted = config.cache.kv_cache_memory
    if config.model.device == "cuda":
        return Finding("model", "ok", f"{text}, while they pass through it to the GPU.")
    if wanted is not None and wanted > left * 2**30:
        text += f", and kv_cache_memory is {wanted / 2**30:.1f} GiB."
        return Finding("model", "failed", text, "lower --kv-cache-memory")
    return Finding("model", "ok", f"{text} for the KV cache and the rest.")
