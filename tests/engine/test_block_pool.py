from __future__ import annotations

import pytest

from ropeway.engine.block_pool import NULL_BLOCK, BlockPool


def test_null_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert pool.num_usable == pool.num_free == 4
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert NULL_BLOCK not in {1, 2, 3, 4}
    assert pool.num_free == 0


def test_a_pool_needs_a_block_besides_the_null_block() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_empty_blocks_are_used_before_cached_ones_and_those_by_age() -> None:
    pool = BlockPool(5)
    a, b, c, d = pool.take(4)
    for block, name in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.publish(block, name)
    pool.release([b, a, c, d])  # d holds nothing worth keeping
    assert pool.num_cached == 3
    assert pool.take(1) == [d]
    assert pool.take(2) == [b, a]  # released first, evicted first
    assert pool.block_of == {b"c": c}


def test_sharing_revives_a_cached_block_and_counts_references() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.publish(block, b"h")
    pool.release([block])
    assert pool.is_free(block)
    pool.share([block])
    pool.share([block])
    assert pool.ref_cnt[block] == 2
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.num_cached == 1


def test_second_publisher_of_the_same_content_stays_private() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.publish(first, b"h")
    pool.publish(second, b"h")
    assert pool.block_of[b"h"] == first
    pool.release([second])
    assert pool.num_cached == 0  # its content is found in the first, so it is simply empty
    pool.release([first])
    assert pool.num_cached == 1


def test_reset_forgets_cached_blocks_and_hides_used_ones() -> None:
    pool = BlockPool(4)
    used, cached = pool.take(2)
    pool.publish(used, b"u")
    pool.publish(cached, b"c")
    pool.release([cached])
    pool.reset()
    assert pool.block_of == {}
    assert pool.num_cached == 0
    assert pool.num_free == 2
    pool.release([used])
    assert pool.num_free == 3
    assert pool.num_cached == 0
