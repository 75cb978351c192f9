"""Finds the GPU and decides how much of its memory the KV cache may take."""

import logging
import os
from collections.abc import MutableMapping

import torch

from headrace_engine.errors import ConfigError
from headrace_engine.system.private_folder import first_private

logger = logging.getLogger(__name__)

# The rest is for CUDA graphs, cuBLAS workspaces and fragmentation.
_MEMORY_SHARE = 0.92


def find_device() -> torch.device:
    """Return the first GPU that torch finds (`CUDA_VISIBLE_DEVICES` selects another one).

    Raises:
        ConfigError: there is none. The engine does not fall back to the CPU.
    """
    if torch.version.cuda is None:
        raise ConfigError(f"device cuda was asked for, but torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device cuda was asked for, but torch {torch.__version__} finds no usable GPU: "
            "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", 0)


def is_gpu(device: torch.device) -> bool:
    """Whether a device has CUDA graphs, events and pinned memory. The CPU, on which tests run this code, has none."""
    return device.type == "cuda"


def keep_kernels_private(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make Triton cache its kernels where only this user can write, unless `TRITON_CACHE_DIR` names a folder."""
    if environ.get("TRITON_CACHE_DIR"):
        return
    try:
        environ["TRITON_CACHE_DIR"] = str(first_private("triton", logger.warning, environ))
    except OSError as error:
        logger.warning("Triton's kernels are kept in its own cache: %s", error)


def kv_memory(free: int, activations: int) -> int:
    """Return the bytes for K/V, given the free bytes and the bytes for the activations of a step."""
    return max(0, int(free * _MEMORY_SHARE) - activations)
