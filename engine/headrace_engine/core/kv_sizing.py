"""How many KV blocks an engine gets. Imports no torch."""

import logging

from headrace_engine.config import FITTING_LENGTH, EngineConfig
from headrace_engine.errors import ConfigError
from headrace_engine.runner.contracts import KVSpec

logger = logging.getLogger(__name__)


def num_kv_blocks(config: EngineConfig, spec: KVSpec, max_model_len: int) -> int:
    """Return the number of KV blocks, null block included: as many as the options and the free memory allow.

    Raises:
        ConfigError: a request of `max_model_len` tokens does not fit, or the blocks exceed the free memory.
    """
    needed = -(-max_model_len // spec.block_size) + 1  # one request of full length, and the null block
    if config.cache.num_blocks is not None:
        available, source = config.cache.num_blocks, "num_blocks"
    else:
        memory = config.cache.kv_cache_memory
        available = (memory if memory is not None else spec.default_memory) // spec.bytes_per_block
        source = "the default of free memory" if memory is None else f"kv_cache_memory={memory}"
    if config.model.max_model_len == FITTING_LENGTH:
        needed = min(needed, max(available, 2))
    if available < needed:
        raise ConfigError(
            f"one request of max_model_len={max_model_len} tokens needs {needed} KV blocks "
            f"({needed * spec.bytes_per_block / 2**20:.0f} MiB) but {source} gives {available}: "
            "give more KV memory or lower max_model_len"
        )
    enough = (needed - 1) * config.scheduler.max_num_seqs + 1
    wanted = min(available, enough) if config.cache.num_blocks is None else available
    if spec.available_memory is not None and wanted * spec.bytes_per_block > spec.available_memory:
        raise ConfigError(
            f"{source} asks for {wanted * spec.bytes_per_block / 2**20:.0f} MiB of KV memory, "
            f"but only {spec.available_memory / 2**20:.0f} MiB are free"
        )
    logger.info("KV cache: %d blocks of %d tokens", wanted, spec.block_size)
    return wanted
