"""The pool of KV blocks: reference counts, the list of free blocks, and the lookup of blocks with reusable content.

    block 0: the null block, for padding only, never allocated
    free list (doubly linked, O(1) removal from the middle), reused from the left:

        never used | no content worth keeping | least recently used prefix content ... most recently used

A free block with a hash keeps its content until it is allocated again: eviction is lazy. After vLLM's block pool.
Knows nothing about requests. Imports no torch.
"""

from collections.abc import Iterable, Sequence


class Block:
    """One block of KV memory. It is in the free list exactly if `ref_count` is 0."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, hashed={self.block_hash is not None})"


class FreeList:
    """Doubly linked list of the blocks themselves. All operations are O(1)."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head = Block(-1)
        self._tail = Block(-2)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def append(self, block: Block) -> None:
        """Add to the right end: reused last."""
        assert self._tail.prev_free is not None
        self._insert(self._tail.prev_free, block, self._tail)

    def prepend(self, block: Block) -> None:
        """Add to the left end: reused first."""
        assert self._head.next_free is not None
        self._insert(self._head, block, self._head.next_free)

    def pop_left(self) -> Block:
        block = self._head.next_free
        assert block is not None and block is not self._tail, "no free block"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        before, after = block.prev_free, block.next_free
        assert before is not None and after is not None, f"{block} is not in the free list"
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._length -= 1

    def _insert(self, before: Block, block: Block, after: Block) -> None:
        assert block.prev_free is None, f"{block} is in the free list already"
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self._length += 1

    def ids(self) -> list[int]:
        """Return the ids from left to right, for integrity checks and tests."""
        found: list[int] = []
        block = self._head.next_free
        while block is not None and block is not self._tail:
            found.append(block.block_id)
            block = block.next_free
        return found


class BlockPool:
    """A pool of `num_blocks` blocks. Block 0 is reserved."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool needs the null block and one more"
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeList(self.blocks[1:])
        self._by_hash: dict[bytes, Block] = {}
        self._hashed_in_use = 0

    @property
    def num_usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached_free(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._by_hash) - self._hashed_in_use

    def allocate(self, count: int) -> list[Block]:
        """Allocate `count` blocks with undefined content. The caller has checked `num_free`."""
        assert count <= self.num_free, f"asked for {count} blocks, {self.num_free} are free"
        blocks = [self._free.pop_left() for _ in range(count)]
        for block in blocks:
            self._forget(block)
            block.ref_count = 1
        return blocks

    def cached(self, block_hash: bytes) -> Block | None:
        return self._by_hash.get(block_hash)

    def share(self, blocks: Sequence[Block]) -> None:
        """Add one reference to each block. Free blocks leave the free list."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
                self._hashed_in_use += 1  # only blocks with a hash are found while they are free
            block.ref_count += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Drop one reference to each block, given in the order of the sequence.

        The last blocks of a sequence are reused before the first ones, which other sequences may share.
        """
        for block in reversed(blocks):
            assert block.ref_count > 0, f"{block} is released but nobody holds it"
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.block_hash is None:
                self._free.prepend(block)
            else:
                self._hashed_in_use -= 1
                self._free.append(block)

    def remember(self, block: Block, block_hash: bytes) -> None:
        """Register the content of a full block in use. If several blocks have the same content, the first is found."""
        assert block.ref_count > 0
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block
            self._hashed_in_use += 1

    def forget_all(self) -> bool:
        """Forget the content of all blocks. Return False, and forget nothing, if a block is in use."""
        if self.num_free < self.num_usable:
            return False
        for block in self._by_hash.values():
            block.block_hash = None
        self._by_hash.clear()
        return True

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            block.block_hash = None

    def check_integrity(self) -> None:
        """Assert that every block is either in use or free, and that every hash leads to its block."""
        free = self._free.ids()
        assert len(free) == len(set(free)) == len(self._free)
        held = {block.block_id for block in self.blocks[1:] if block.ref_count > 0}
        assert held.isdisjoint(free)
        assert len(held) + len(free) == self.num_usable
        assert self.blocks[0].ref_count == 0
        assert all(block.block_hash == key for key, block in self._by_hash.items())
        assert self._hashed_in_use == sum(block.ref_count > 0 for block in self._by_hash.values())
