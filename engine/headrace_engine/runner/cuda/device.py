"""The GPU: whether it is there, and how much of its memory is free."""

import logging
import os
from collections.abc import MutableMapping

import torch
from torch import nn

from headrace_engine.errors import ConfigError
from headrace_engine.private_folder import first_private

logger = logging.getLogger(__name__)

# Left free: CUDA graphs, cuBLAS' workspaces, and what fragments.
_MEMORY_SHARE = 0.92


def find_device() -> torch.device:
    """The first GPU that torch sees (`CUDA_VISIBLE_DEVICES` chooses another one).

    Raises:
        ConfigError: there is none; nothing goes on with the CPU instead.
    """
    if torch.version.cuda is None:
        raise ConfigError(f"device cuda was asked for, but torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device cuda was asked for, but torch {torch.__version__} finds no usable GPU: "
            "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", 0)


def keep_kernels_private(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let Triton keep what it compiles where nobody else can write, unless `TRITON_CACHE_DIR` names a folder."""
    if environ.get("TRITON_CACHE_DIR"):
        return
    try:
        environ["TRITON_CACHE_DIR"] = str(first_private("triton", logger.warning, environ))
    except OSError as error:
        logger.warning("Triton's kernels are kept in its own cache: %s", error)


def free_memory(device: torch.device) -> int:
    """Bytes of the GPU that nobody holds; what torch's allocator keeps unused counts as free."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def kv_memory(free: int, activations: int) -> int:
    """Bytes for K/V out of the free ones, when a step's activations take that many."""
    return max(0, int(free * _MEMORY_SHARE) - activations)


def check_model_fits(model: nn.Module, device: torch.device) -> None:
    """Raises ConfigError, naming what the weights need and what is free."""
    if device.type != "cuda":
        return
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    free = free_memory(device)
    if needed > free:
        raise ConfigError(
            f"the weights take {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB of the GPU's memory are free"
        )
