"""Finds the GPU and decides how much of its memory the KV cache may take."""

import logging
import os
from collections.abc import MutableMapping

import torch

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


def kv_memory(free: int, activations: int) -> int:
    """Bytes for K/V out of the free ones, when a step's activations take that many."""
    return max(0, int(free * _MEMORY_SHARE) - activations)
