"""BlockPool: who holds a block, what it remembers, and which one goes first."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pagefleet.blocks import BlockPool, OutOfBlocks, hash_blocks, hash_root

ROOT = hash_root(None)


def hashes(count: int, salt: str = "") -> list[bytes]:
    return hash_blocks(np.arange(4 * count, dtype=np.int32), 4, hash_root(salt))


def fill(pool: BlockPool, names: list[bytes]) -> np.ndarray:
    """Blocks that hold what `names` say, one reference each."""
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks.tolist(), names, strict=True):
        pool.register(block, name)
    return blocks


def test_blocks_are_handed_out_on_demand_each_once() -> None:
    pool = BlockPool(10)
    first, second = pool.allocate(3), pool.allocate(4)
    assert first.dtype == np.int32
    assert len({*first.tolist(), *second.tolist()}) == 7
    assert (pool.num_held, pool.num_available) == (7, 3)
    assert len(pool.allocate(0)) == 0
    assert pool.ref_counts.sum() == 7


def test_a_released_block_is_handed_out_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.release(blocks[:1])
    assert pool.allocate(1).tolist() == blocks[:1].tolist()


def test_asking_for_too_many_takes_none() -> None:
    pool = BlockPool(4)
    pool.release(fill(pool, hashes(2)))
    held = pool.allocate(1)
    with pytest.raises(OutOfBlocks, match="4 blocks wanted, 3 of 4 available"):
        pool.allocate(4)
    assert pool.num_held == 1
    assert len(pool.match(hashes(2))) == 2, "nothing was evicted for it"
    assert held[0] not in pool.allocate(3)


def test_a_shared_block_is_held_until_its_last_holder_releases_it() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.share(blocks[:1])
    assert pool.ref_counts[blocks].tolist() == [3, 2]
    pool.release(blocks)
    pool.release(blocks)
    assert pool.ref_counts[blocks].tolist() == [1, 0]
    assert pool.num_held == 1


def test_releasing_more_often_than_held_raises_and_changes_nothing() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks[1:])
    with pytest.raises(ValueError, match=rf"\[{blocks[1]}\] are released more often than held"):
        pool.release(blocks)
    assert pool.ref_counts[blocks].tolist() == [1, 0]
    assert pool.num_available == 3


def test_a_released_block_with_known_contents_can_be_taken_up_again() -> None:
    pool = BlockPool(4)
    blocks = fill(pool, hashes(2))
    pool.release(blocks)
    assert pool.num_available == 4, "cached blocks are there for whoever needs them"
    found = pool.match(hashes(3))
    assert found.tolist() == blocks.tolist()
    pool.share(found)
    assert pool.ref_counts[found].tolist() == [1, 1]
    assert not set(pool.allocate(2).tolist()) & set(found.tolist())


def test_a_match_ends_at_the_first_unknown_block() -> None:
    pool = BlockPool(8)
    names = hashes(4)
    fill(pool, [names[0], names[1], names[3]])
    assert len(pool.match(names)) == 2
    assert len(pool.match(names[2:])) == 0
    assert len(pool.match([])) == 0


def test_cached_blocks_are_evicted_last_and_the_end_of_a_sequence_before_its_start() -> None:
    pool = BlockPool(6)
    old, new = hashes(3, "old"), hashes(2, "new")
    old_blocks, new_blocks = fill(pool, old), fill(pool, new)
    pool.release(old_blocks)
    pool.release(new_blocks)
    taken = pool.allocate(1)
    assert taken[0] not in {*old_blocks.tolist(), *new_blocks.tolist()}, "a free block comes first"
    evicted = [int(pool.allocate(1)[0]) for _ in range(5)]
    assert evicted == [*old_blocks[::-1].tolist(), *new_blocks[::-1].tolist()]
    assert len(pool.match(old)) == len(pool.match(new)) == 0


def test_use_makes_a_cached_block_recent() -> None:
    pool = BlockPool(2)
    first, second = hashes(1, "first"), hashes(1, "second")
    blocks = np.concatenate([fill(pool, first), fill(pool, second)])
    pool.release(blocks[:1])
    pool.release(blocks[1:])
    pool.share(blocks[:1])
    pool.release(blocks[:1])
    assert pool.allocate(1).tolist() == blocks[1:].tolist()
    assert len(pool.match(first)) == 1


def test_the_first_block_of_some_contents_keeps_their_name() -> None:
    pool = BlockPool(4)
    first, duplicate = fill(pool, hashes(1)), fill(pool, hashes(1))
    assert pool.match(hashes(1)).tolist() == first.tolist()
    pool.release(duplicate)
    assert pool.allocate(1).tolist() == duplicate.tolist(), "a duplicate is not kept"
    pool.register(int(first[0]), hashes(2)[1])
    assert len(pool.match(hashes(2)[1:])) == 0, "a block has one name"


def test_a_reset_forgets_contents_and_leaves_holders_alone() -> None:
    pool = BlockPool(4)
    held, cached = fill(pool, hashes(2, "held")), fill(pool, hashes(2, "cached"))
    pool.release(cached)
    pool.reset_cache()
    assert len(pool.match(hashes(2, "held"))) == len(pool.match(hashes(2, "cached"))) == 0
    assert (pool.num_held, pool.num_available) == (2, 2)
    pool.release(held)
    assert sorted(pool.allocate(4).tolist()) == [0, 1, 2, 3]


def test_a_hash_names_a_block_and_all_before_it() -> None:
    block, other = [1, 2, 3, 4], [5, 6, 7, 8]
    alone = hash_blocks(np.array(block, np.int32), 4, ROOT)
    after = hash_blocks(np.array(other + block, np.int32), 4, ROOT)
    assert after[1] != alone[0], "the same tokens after another prefix"
    assert after[1:] == hash_blocks(np.array(block, np.int32), 4, after[0]), "a chain can be taken up anywhere"
    assert hash_blocks(np.array(block, np.int32), 4, hash_root("salt")) != alone
    assert hash_root("") == hash_root(None) != hash_root("salt")


def test_only_full_blocks_have_a_hash() -> None:
    tokens = np.arange(11, dtype=np.int64)
    assert [len(hash_blocks(tokens[:n], 4, ROOT)) for n in (0, 3, 4, 7, 8, 11)] == [0, 0, 1, 1, 2, 2]
    assert hash_blocks(tokens, 4, ROOT) == hash_blocks(tokens[:8].astype(np.int32), 4, ROOT)


def test_the_cost_of_an_operation_does_not_grow_with_the_pool() -> None:
    def seconds(num_blocks: int) -> float:
        pool, best = BlockPool(num_blocks), float("inf")
        for _ in range(30):
            start = time.perf_counter()
            blocks = fill(pool, hashes(16))
            found = pool.match(hashes(16))
            pool.share(found)
            pool.release(blocks)
            pool.release(found)
            best = min(best, time.perf_counter() - start)
        return best

    small, large = seconds(1000), seconds(1_000_000)
    assert large < 4 * small, f"{large * 1e6:.0f} us with a million blocks, {small * 1e6:.0f} us with a thousand"
