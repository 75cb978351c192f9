"""Chooses the attention backend: the compiled kernel where it can serve the model, plain torch where it cannot."""

import logging

from headrace_engine.errors import ConfigError
from headrace_engine.runner.attention.backend import AttentionBackend, AttentionSpec
from headrace_engine.runner.attention.native import NativeBackend
from headrace_engine.runner.attention.reference import ReferenceBackend

logger = logging.getLogger(__name__)


def choose_backend(wanted: str, spec: AttentionSpec) -> AttentionBackend:
    if wanted == "torch":
        return ReferenceBackend(spec)
    reason = NativeBackend.unsupported_reason(spec)
    if reason is None:
        return NativeBackend(spec)
    if wanted == "native":
        raise ConfigError(f"attention_backend=native cannot be used: {reason}")
    logger.warning("attention runs in plain torch, which is many times slower: %s", reason)
    return ReferenceBackend(spec)
