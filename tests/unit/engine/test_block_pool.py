"""The block pool: counts, the order of reuse, and content that outlives its holder."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace_engine.core.block_pool import Block, BlockPool, FreeList


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert ids(pool.allocate(3)) == [1, 2, 3]
    assert pool.num_free == 0


def test_asking_for_more_than_is_free_is_an_error() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="asked for 3 blocks, 2 are free"):
        pool.allocate(3)


def test_a_released_block_without_content_is_reused_before_untouched_ones() -> None:
    pool = BlockPool(5)
    first = pool.allocate(2)
    pool.release(first)
    assert ids(pool.allocate(3)) == [1, 2, 3]


def test_a_double_release_is_an_error() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(blocks)


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 0
    pool.release(blocks)
    assert pool.num_free == 1


def test_content_can_be_hit_after_its_holder_left_and_until_the_block_is_reused() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.remember(block, b"x")
    pool.release([block])
    assert pool.cached(b"x") is block
    assert (pool.num_free, pool.num_cached_free) == (2, 1)
    pool.allocate(1)  # the untouched block goes first
    assert pool.cached(b"x") is block
    pool.allocate(1)
    assert pool.cached(b"x") is None
    pool.check_integrity()


def test_the_least_recently_released_content_is_evicted_first_and_tails_before_fronts() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, (b"front", b"middle", b"tail"), strict=True):
        pool.remember(block, name)
    pool.release(blocks)
    pool.allocate(1)
    assert [name for name in (b"front", b"middle", b"tail") if pool.cached(name)] == [b"front", b"middle"]
    pool.allocate(1)
    assert pool.cached(b"front") and not pool.cached(b"middle")


def test_a_hit_takes_the_block_out_of_the_middle_of_the_free_list() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, (b"1", b"2", b"3"), strict=True):
        pool.remember(block, name)
    pool.release(blocks)
    hit = pool.cached(b"2")
    assert hit is not None
    pool.share([hit])
    assert (pool.num_free, pool.num_cached_free) == (2, 2)
    assert hit not in pool.allocate(2)
    pool.check_integrity()


def test_the_first_block_of_a_content_wins() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.remember(first, b"x")
    pool.remember(second, b"x")
    assert pool.cached(b"x") is first
    assert second.block_hash is None
    pool.check_integrity()


def test_the_free_list_removes_from_anywhere_and_keeps_the_order_of_the_rest() -> None:
    blocks = [Block(i) for i in range(5)]
    free = FreeList(blocks)
    free.remove(blocks[2])
    free.remove(blocks[0])
    free.remove(blocks[4])
    assert free.ids() == [1, 3]
    free.prepend(blocks[4])
    free.append(blocks[0])
    assert free.ids() == [4, 1, 3, 0]
    assert len(free) == 4
    with pytest.raises(AssertionError, match="not in the free list"):
        free.remove(blocks[2])
    with pytest.raises(AssertionError, match="in the free list already"):
        free.append(blocks[1])


class PoolMachine(RuleBasedStateMachine):
    """Random tables against a model that is nothing but counters."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.tables: list[list[Block]] = []
        self.names = 0

    @rule(count=st.integers(1, 4), share=st.integers(0, 3))
    def allocate(self, count: int, share: int) -> None:
        hits = [block for block in self.pool.blocks[1:] if block.block_hash][:share]
        revived = sum(block.ref_count == 0 for block in hits)
        if count <= self.pool.num_free - revived:
            self.pool.share(hits)
            fresh = self.pool.allocate(count)
            assert all(block.block_hash is None and block.ref_count == 1 for block in fresh)
            self.tables.append([*hits, *fresh])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), reuse=st.booleans())
    def remember(self, data: st.DataObject, reuse: bool) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.names += not reuse
        self.pool.remember(data.draw(st.sampled_from(table)), str(self.names).encode())

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        held = [block.block_id for table in self.tables for block in table]
        assert [block.ref_count for block in self.pool.blocks] == [held.count(i) for i in range(8)]
        assert self.pool.num_free == 7 - len(set(held))
        assert self.pool.num_cached_free == sum(
            block.ref_count == 0 and block.block_hash is not None for block in self.pool.blocks
        )


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
