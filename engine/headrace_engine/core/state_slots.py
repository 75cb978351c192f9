"""Allocates slots for the states of recurrent layers: convolutions, linear attention, Mamba.

Such a layer keeps a state of fixed size instead of keys and values. It cannot be taken back by a token, and it exists
only after the last token computed. So the prefix cache needs snapshots: copies of the state at block borders. A hit
ends at a block that has one.

    slot      | 0 | 1 | 2      | 3      | 4    |
    holds       a   b   after A  after B  free      requests a and b run, snapshots follow the blocks A and B

A snapshot is found by the hash of its last block. If no slot is free, the least recently used snapshot is dropped. A
snapshot whose block was evicted is not found any more, and is dropped in its turn. Imports no torch.
"""

import logging
from collections.abc import Collection, Sequence

from headrace_engine.core.block_pool import Block
from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.requests.request import Request
from headrace_engine.runner.contracts import KVSpec, StateSnapshot

logger = logging.getLogger(__name__)


class StateSlots:
    """Slots 0 to `num_slots - 1`. Each running request has one, the others are free or hold snapshots."""

    def __init__(self, num_slots: int, *, keeps_snapshots: bool = True) -> None:
        self.num_slots = num_slots
        self._keeps_snapshots = keeps_snapshots
        self._free = list(range(num_slots - 1, -1, -1))
        self._owned: dict[str, int] = {}
        """Request id -> slot."""
        self._snapshots: dict[bytes, int] = {}
        """Hash of the last block -> slot. The least recently used snapshot is first."""
        self._planned: dict[bytes, int] = {}
        """Snapshots that the present step writes."""
        self._latest: dict[str, bytes] = {}
        """Request id -> its snapshot that the next one replaces."""
        self._shared_until: dict[str, int] = {}
        """Request id -> how many of its tokens are in blocks of the prefix cache, also those after its hits."""

    def has_snapshot(self, block_hash: bytes) -> bool:
        return block_hash in self._snapshots

    def admit(self, request: Request, hits: Sequence[Block], num_shared: int) -> tuple[int, int | None]:
        """Allocate the slot of a request that starts to run. At most `num_slots` requests may run.

        Args:
            hits: its prefix-cache hits. The last one has a snapshot.
            num_shared: how many of its first blocks are in the prefix cache. Only `hits` of them can be used.

        Returns:
            The slot, and the slot to copy the state from. The two may be the same. None: there is no state to start
            from.
        """
        assert request.request_id not in self._owned, f"{request.request_id} has a slot already"
        source = None
        if hits:
            last = hits[-1].block_hash
            assert last is not None
            source = self._snapshots.pop(last)
            self._snapshots[last] = source  # used most recently now
        slot = self._take()
        assert slot is not None, "more requests run than there are slots"
        self._owned[request.request_id] = slot
        self._shared_until[request.request_id] = num_shared * request.block_size
        return slot, source

    def release(self, request: Request) -> None:
        """Free the slot of a request, if it has one. Its snapshots stay."""
        slot = self._owned.pop(request.request_id, None)
        if slot is not None:
            self._free.append(slot)
        self._latest.pop(request.request_id, None)
        self._shared_until.pop(request.request_id, None)

    def plan_snapshots(self, request: Request, num_new_tokens: int) -> list[StateSnapshot]:
        """Return the snapshots to take while the last `num_new_tokens` computed tokens of a request are computed.

        There are up to two. The first is where the blocks end that the request has in common with earlier ones: later
        requests with the same beginning need it. The second is at the last border, for the next turn of a conversation
        and for the request itself after a preemption. It replaces the request's one before it, but those of the first
        kind and the one at the end of a prompt stay.
        """
        if not self._keeps_snapshots:
            return []
        end, size = request.num_computed_tokens, request.block_size
        start = end - num_new_tokens
        is_prompt = num_new_tokens > 1
        # A hit never covers the last token of a prompt, so a repeated prompt needs the border before that token.
        last = min(end, request.num_tokens - 1 if is_prompt else end) // size * size
        shared = self._shared_until[request.request_id]
        planned = []
        for border in sorted({shared, last}):
            if not start < border <= end:
                continue
            block_hash = request.block_hashes[border // size - 1]
            if block_hash in self._snapshots or block_hash in self._planned:
                continue
            moves = border == last
            slot = self._slot_for_snapshot(request.request_id, moves=moves)
            if slot is None:
                continue
            self._planned[block_hash] = slot
            planned.append(StateSnapshot(num_tokens=border, slot=slot))
            if moves and border != shared and not (is_prompt and end == request.num_tokens):
                self._latest[request.request_id] = block_hash
        return planned

    def keep_planned(self) -> None:
        """Make the planned snapshots available, because their step is complete."""
        self._snapshots |= self._planned
        self._planned.clear()

    def forget_snapshots(self) -> None:
        self._free += self._snapshots.values()
        self._snapshots.clear()
        self._latest.clear()

    def _slot_for_snapshot(self, request_id: str, *, moves: bool) -> int | None:
        if moves and (latest := self._latest.pop(request_id, None)) in self._snapshots:
            return self._snapshots.pop(latest)
        return self._take()

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._snapshots:
            return None
        return self._snapshots.pop(next(iter(self._snapshots)))

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Assert that exactly these requests have slots, and that each slot has one use."""
        assert set(self._owned) == {request.request_id for request in requests}
        assert set(self._latest) <= set(self._owned) == set(self._shared_until)
        assert not self._planned, "snapshots of a step are neither kept nor dropped"
        used = [*self._free, *self._owned.values(), *self._snapshots.values()]
        assert sorted(used) == list(range(self.num_slots))


def num_state_slots(config: EngineConfig, spec: KVSpec) -> int:
    """Return the number of slots: two for each of `max_num_seqs`, but no more than half of the KV memory holds.

    0 if the model has no recurrent layers.

    Raises:
        ConfigError: half of the KV memory does not hold a single state.
    """
    if not spec.bytes_per_state:
        return 0
    wanted = config.scheduler.max_num_seqs * (2 if config.cache.enable_prefix_caching else 1)
    if config.cache.num_blocks is not None:
        return wanted
    memory = config.cache.kv_cache_memory
    fitting = (spec.default_memory if memory is None else memory) // 2 // spec.bytes_per_state
    if not fitting:
        raise ConfigError(
            f"a request needs {spec.bytes_per_state / 2**20:.0f} MiB for the states of recurrent layers, which is more "
            "than half of the KV memory: give more by kv_cache_memory"
        )
    if fitting < config.scheduler.max_num_seqs:
        logger.warning("%d requests run at once: kv_cache_memory holds no more recurrent states", fitting)
    return min(wanted, fitting)
