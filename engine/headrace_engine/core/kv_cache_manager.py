"""Allocates KV blocks to requests.

    request tokens   |<- computed before ->|<- new in this step ->|
    block table      [ shared ][ shared ][ own ][ own ][ own, not full ]
                      ^ prefix-cache hits, full blocks only

Requests share only blocks that are full after the present step. A request writes only to the blocks that it has
allocated, never to its prefix-cache hits. If the model has recurrent layers, a request also gets a slot for their
states, and its hits end at a block with a snapshot (`state_slots.py`). Imports no torch.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from headrace_engine.core.block_pool import Block, BlockPool
from headrace_engine.core.state_slots import StateSlots
from headrace_engine.errors import ConfigError
from headrace_engine.options.config import FITTING_LENGTH, EngineConfig
from headrace_engine.requests.request import Request
from headrace_engine.runner.contracts import KVSpec


class KVCacheManager:
    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, num_states: int = 0
    ) -> None:
        self.block_size = block_size
        self.states = StateSlots(num_states, keeps_snapshots=enable_prefix_caching) if num_states else None
        """None: the model has no recurrent layers."""
        self.pool = BlockPool(num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self._tables: dict[str, list[Block]] = {}
        self._num_remembered: dict[str, int] = {}
        """By request id: how many leading blocks of its table are registered with their hashes."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def computed_blocks(self, request: Request) -> list[Block]:
        """Return the longest run of leading full blocks whose content is in the pool, and whose end has a snapshot.

        At most `num_tokens - 1` tokens are hits, as the last one must be computed for its logits. A request for prompt
        log-probabilities has no hits, as it needs the logits of every token.
        """
        hits = self._cached_blocks(request)
        if self.states is not None:
            while hits and (hits[-1].block_hash is None or not self.states.has_snapshot(hits[-1].block_hash)):
                hits.pop()
        return hits

    def _cached_blocks(self, request: Request) -> list[Block]:
        if not self.enable_prefix_caching or request.prompt_logprobs is not None:
            return []
        most = (request.num_tokens - 1) // self.block_size
        hits: list[Block] = []
        for block_hash in request.block_hashes[:most]:
            block = self.pool.cached(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def admit_state(self, request: Request, hits: list[Block]) -> tuple[int | None, int | None]:
        """Allocate the slot for recurrent states. Return it and the slot to copy from, None if there is none."""
        if self.states is None:
            return None, None
        return self.states.admit(request, hits, len(self._cached_blocks(request)))

    def num_needed(self, hits: list[Block], num_tokens: int) -> int:
        """Return how many free blocks a table of `num_tokens` tokens takes if its first blocks are the hits."""
        revived = sum(block.ref_count == 0 for block in hits)
        return self.blocks_for(num_tokens) - len(hits) + revived

    def freed_one_by_one(self, requests: Iterable[Request], hits: list[Block]) -> Iterator[tuple[Request, int]]:
        """Yield each request with the number of blocks that become free if it and all before it are preempted.

        Blocks among `hits` do not count, because the new request takes them at once.
        """
        taken = set(hits)
        holders: Counter[Block] = Counter()
        num_freed = 0
        for request in requests:
            for block in self._tables[request.request_id]:
                holders[block] += 1
                num_freed += holders[block] == block.ref_count and block not in taken
            yield request, num_freed

    def admit(self, request: Request, hits: list[Block], num_new_tokens: int) -> list[int]:
        """Allocate the table of a request: its hits, and blocks for `num_new_tokens` tokens after them.

        Returns:
            The block ids of the whole table. The caller has checked `num_needed`.
        """
        assert request.request_id not in self._tables, f"{request.request_id} holds blocks already"
        num_new = self.blocks_for(len(hits) * self.block_size + num_new_tokens) - len(hits)
        self.pool.share(hits)
        self._tables[request.request_id] = [*hits, *self.pool.allocate(num_new)]
        request.num_slots = (len(hits) + num_new) * self.block_size
        self._num_remembered[request.request_id] = len(hits)
        return self.block_ids(request)

    def extend(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Allocate blocks for `num_new_tokens` more tokens. Return their ids, or None if there are too few."""
        num_tokens = request.num_computed_tokens + num_new_tokens
        if num_tokens <= request.num_slots:
            return []
        table = self._tables[request.request_id]
        num_new = self.blocks_for(num_tokens) - len(table)
        if num_new > self.pool.num_free:
            return None
        blocks = self.pool.allocate(num_new)
        table.extend(blocks)
        request.num_slots = len(table) * self.block_size
        return [block.block_id for block in blocks]

    def remember_full_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Register the blocks that `num_computed_tokens` fill, so that later requests find them."""
        if not self.enable_prefix_caching:
            return
        done = self._num_remembered[request.request_id]
        full = num_computed_tokens // self.block_size
        if full <= done:
            return
        table = self._tables[request.request_id]
        for index in range(done, full):
            self.pool.remember(table[index], request.block_hashes[index])
        self._num_remembered[request.request_id] = full

    def free(self, request: Request) -> None:
        """Free all blocks of a request, if it has any, and the slot of its states."""
        self.pool.release(self._tables.pop(request.request_id, []))
        request.num_slots = 0
        self._num_remembered.pop(request.request_id, None)
        if self.states is not None:
            self.states.release(request)

    def forget_prefixes(self) -> bool:
        """Empty the prefix cache. Return False, and forget nothing, if a block is in use."""
        is_done = self.pool.forget_all()
        if is_done and self.states is not None:
            self.states.forget_snapshots()
        return is_done

    def block_ids(self, request: Request) -> list[int]:
        return [block.block_id for block in self._tables[request.request_id]]

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Assert that exactly these requests have blocks, and that the reference counts add up."""
        request_ids = {request.request_id for request in requests}
        assert set(self._tables) == request_ids, f"holding blocks: {set(self._tables) ^ request_ids}"
        assert all(r.num_slots == len(self._tables[r.request_id]) * self.block_size for r in requests)
        counts = [0] * len(self.pool.blocks)
        for table in self._tables.values():
            for block in table:
                counts[block.block_id] += 1
        assert counts == [block.ref_count for block in self.pool.blocks]
        self.pool.check_integrity()
        if self.states is not None:
            self.states.check_integrity(requests)


logger = logging.getLogger(__name__)


def num_kv_blocks(config: EngineConfig, spec: KVSpec, max_model_len: int, num_states: int = 0) -> int:
    """Return the number of KV blocks, null block included: as many as the options and the free memory allow.

    The slots for `num_states` recurrent states are part of the KV memory.

    Raises:
        ConfigError: a request of `max_model_len` tokens does not fit, or the blocks exceed the free memory.
    """
    state_bytes = num_states * spec.bytes_per_state
    needed = -(-max_model_len // spec.block_size) + 1  # one request of full length, and the null block
    if config.cache.num_blocks is not None:
        available, source = config.cache.num_blocks, "num_blocks"
    else:
        memory = config.cache.kv_cache_memory
        memory_for_blocks = (memory if memory is not None else spec.default_memory) - state_bytes
        available = memory_for_blocks // spec.bytes_per_block
        source = "the default of free memory" if memory is None else f"kv_cache_memory={memory}"
    if config.model.max_model_len == FITTING_LENGTH:
        needed = min(needed, max(available, 2))
    if available < needed:
        raise ConfigError(
            f"one request of max_model_len={max_model_len} tokens needs {needed} KV blocks "
            f"({needed * spec.bytes_per_block / 2**20:.0f} MiB) but {source} gives {available}{_beside(state_bytes)}: "
            "give more KV memory or lower max_model_len"
        )
    enough = (needed - 1) * config.scheduler.max_num_seqs + 1
    wanted = min(available, enough) if config.cache.num_blocks is None else available
    wanted_bytes = wanted * spec.bytes_per_block + state_bytes
    if spec.available_memory is not None and wanted_bytes > spec.available_memory:
        raise ConfigError(
            f"{source} asks for {wanted_bytes / 2**20:.0f} MiB of KV memory, "
            f"but only {spec.available_memory / 2**20:.0f} MiB are free"
        )
    logger.info("KV cache: %d blocks of %d tokens%s", wanted, spec.block_size, _beside(state_bytes))
    return wanted


def _beside(state_bytes: int) -> str:
    return f" beside {state_bytes / 2**20:.0f} MiB of recurrent states" if state_bytes else ""
