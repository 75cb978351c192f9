"""Creates the runner for a device. Imports torch only after the environment of the device has been set."""

import os
import sys

from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.devices import DEVICES, Device
from headrace_engine.runner.contracts import ModelRunner, PoolingRunner


def create_runner(config: EngineConfig) -> ModelRunner:
    """Create the runner for the device of the config. Its model is not loaded yet.

    Raises:
        ConfigError: no runner supports this device, or the machine does not have it.
    """
    device = _device_of(config)
    if device.is_static:
        _prepare_environment(config, device)
        from headrace_engine.runner.static.loader import create_static_runner

        return create_static_runner(config)
    if device.name == "cuda":
        from headrace_engine.runner.cuda.device import find_device, keep_kernels_private
        from headrace_engine.runner.cuda.runner import CUDARunner

        keep_kernels_private()
        return CUDARunner(config, find_device())
    from headrace_engine.runner.cpu import CPURunner

    return CPURunner(config)


def create_pooling_runner(config: EngineConfig) -> PoolingRunner:
    """Create the runner of a model that embeds or scores. Its model is not loaded yet.

    Raises:
        ConfigError: the machine does not have the device, or an option does not fit such a model.
    """
    device = _device_of(config)
    if device.is_static:
        _prepare_environment(config, device)
    from headrace_engine.runner.pooling import placement, pooling_loading
    from headrace_engine.runner.pooling.pooling_runner import TransformersPoolingRunner

    pooling_loading.check_options(config)
    place: placement.Placement
    if device.is_static:
        from headrace_engine.runner.static.devices import create_compiler_backend

        place = placement.StaticPlacement(create_compiler_backend(device.name), config.scheduler.max_pooling_tokens)
    elif device.name == "cuda":
        from headrace_engine.runner.cuda.device import find_device

        place = placement.CUDAPlacement(find_device())
    else:
        place = placement.CPUPlacement()
    return TransformersPoolingRunner(config, place)


def _device_of(config: EngineConfig) -> Device:
    device = DEVICES.get(config.model.device)
    if device is None:
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}, got {config.model.device!r}")
    return device


def _prepare_environment(config: EngineConfig, device: Device) -> None:
    config.static.prepare_environment(device.name, 0, os.environ, is_torch_imported="torch" in sys.modules)
