"""Chooses the attention backend.

On the CPU: the compiled kernel if it can serve the model, otherwise plain torch. On a GPU: Triton.
"""

import logging

import torch

from headrace_engine.errors import ConfigError
from headrace_engine.runner.attention.backend import AttentionBackend, AttentionSpec
from headrace_engine.runner.attention.native import NativeBackend
from headrace_engine.runner.attention.reference import ReferenceBackend
from headrace_engine.runner.attention.triton_backend import TritonBackend

logger = logging.getLogger(__name__)


def choose_backend(wanted: str, spec: AttentionSpec, device: torch.device) -> AttentionBackend:
    """Create the wanted backend. Raises ConfigError if it cannot serve the model on this device."""
    if wanted == "triton" or (wanted == "auto" and device.type != "cpu"):
        reason = TritonBackend.unsupported_reason(spec, device)
        if reason is None:
            return TritonBackend(spec, device)
        raise ConfigError(f"attention_backend={wanted} cannot be used on {device.type}: {reason}")
    if device.type != "cpu":
        raise ConfigError(f"attention_backend={wanted} computes on the CPU only; on {device.type} use triton or auto")
    if wanted == "torch":
        return ReferenceBackend(spec)
    reason = NativeBackend.unsupported_reason(spec)
    if reason is None:
        return NativeBackend(spec)
    if wanted == "native":
        raise ConfigError(f"attention_backend=native cannot be used: {reason}")
    logger.warning("attention runs in plain torch, which is many times slower: %s", reason)
    return ReferenceBackend(spec)
