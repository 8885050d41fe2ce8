"""BlockPool: which KV blocks are free, who shares them, and what they hold.

A block is in one of three places: held (reference count above 0), cached (count 0, but its contents are known by
hash and may be asked for again) or free. Every operation costs time in the blocks it touches, never in the size
of the pool. The pool knows nothing about requests or devices.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free. The scheduler asks first, so a user never sees it."""


def hash_blocks(token_ids: NDArray[np.int32], block_size: int, parent: bytes) -> list[bytes]:
    """Chained hashes of the full blocks of `token_ids` [n]: each names its block and all before it.

    SHA-256 over the parent's hash and the block's tokens as little-endian int32. Different prefixes never collide,
    so no request can be served another's blocks. `parent` of a first block is `hash_root`.
    """
    hashes = []
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    step = 4 * block_size
    for start in range(0, len(data) - step + 1, step):
        parent = hashlib.sha256(parent + data[start : start + step]).digest()
        hashes.append(parent)
    return hashes


def hash_root(salt: str | None) -> bytes:
    """What a chain of block hashes starts from: requests of different salts share nothing."""
    return hashlib.sha256((salt or "").encode()).digest()


class BlockPool:
    """`num_blocks` KV blocks, handed out on demand."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self._free = np.arange(num_blocks, dtype=np.int32)[::-1].copy()  # a stack; its top is at _num_free - 1
        self._num_free = num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # count 0 and hashed, least recently used first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones, and cached ones by eviction."""
        return self._num_free + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> NDArray[np.int32]:
        """Take `count` blocks [count], each with one reference; cached blocks go last, least recently used first.

        Raises OutOfBlocks, taking none, if fewer are available.
        """
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_available} of {self.num_blocks} available")
        while self._num_free < count:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self._push_free(block)
        self._num_free -= count
        blocks = self._free[self._num_free : self._num_free + count].copy()
        self.ref_counts[blocks] = 1
        return blocks

    def share(self, blocks: NDArray[np.int32]) -> None:
        """Add a reference to each of `blocks`, which hold contents (held or cached)."""
        for block in blocks[self.ref_counts[blocks] == 0].tolist():
            del self._cached[block]
        self.ref_counts[blocks] += 1

    def release(self, blocks: NDArray[np.int32]) -> None:
        """Drop one reference from each of `blocks` (distinct, in sequence order).

        Blocks that nobody holds become cached if hashed, the end of the sequence being the first to be evicted.
        """
        if (self.ref_counts[blocks] <= 0).any():
            raise ValueError(
                f"blocks {blocks[self.ref_counts[blocks] <= 0].tolist()} are released more often than held"
            )
        self.ref_counts[blocks] -= 1
        for block in blocks[self.ref_counts[blocks] == 0][::-1].tolist():
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._push_free(block)

    def register(self, block: int, block_hash: bytes) -> None:
        """A held block now has the contents that `block_hash` names. The first block of a hash keeps it."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def match(self, hashes: Iterable[bytes]) -> NDArray[np.int32]:
        """Blocks [k] that hold the first k of `hashes`, k as large as possible. Takes no reference."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return np.array(blocks, np.int32)

    def reset_cache(self) -> None:
        """Forget what every block holds; blocks in use stay held."""
        self._block_of.clear()
        self._hash_of.clear()
        for block in self._cached:
            self._push_free(block)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]

    def _push_free(self, block: int) -> None:
        self._free[self._num_free] = block
        self._num_free += 1
