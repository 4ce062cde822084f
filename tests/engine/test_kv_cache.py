from __future__ import annotations

from ropeway.engine.kv_cache import KVCacheManager
from ropeway.engine.request import Request
from ropeway.protocol import AddRequest, SamplingParams


def make(request_id: int, tokens: list[int], salt: str = "") -> Request:
    return Request(AddRequest(request_id, tokens, SamplingParams(max_tokens=100), 0.0, cache_salt=salt), 1000)


def computed(kv: KVCacheManager, request: Request, num_tokens: int) -> None:
    assert kv.allocate(request, num_tokens, kv.lookup(request)) is not None
    kv.commit(request, num_tokens)


def test_allocate_is_all_or_nothing() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    first, second = make(0, [1] * 8), make(1, [2] * 8)
    assert len(kv.allocate(first, 8) or []) == 2
    assert kv.allocate(second, 8) is None
    assert 1 not in kv.tables
    assert kv.pool.num_free == 1
    assert kv.allocate(first, 17) is None
    assert len(kv.tables[0]) == 2


def test_lookup_finds_full_blocks_but_never_the_last_token() -> None:
    kv = KVCacheManager(num_blocks=20, block_size=4)
    owner = make(0, list(range(12)))
    computed(kv, owner, 12)
    for length, expected in ((12, 8), (13, 12), (11, 8), (4, 0), (5, 4)):
        hit = kv.lookup(make(1, [*range(12), 99][:length]))
        assert hit.num_tokens == expected, length
        assert list(hit.block_ids) == kv.tables[0][: expected // 4]


def test_a_different_token_or_salt_ends_the_prefix() -> None:
    kv = KVCacheManager(num_blocks=20, block_size=4)
    computed(kv, make(0, list(range(12))), 12)
    assert kv.lookup(make(1, [0, 1, 2, 3, 4, 5, 6, 77, 8, 9, 10, 11, 12])).num_tokens == 4
    assert kv.lookup(make(2, [77, *range(1, 12)])).num_tokens == 0
    assert kv.lookup(make(3, list(range(12)), salt="other")).num_tokens == 0


def test_same_block_content_behind_another_prefix_is_another_block() -> None:
    kv = KVCacheManager(num_blocks=20, block_size=4)
    computed(kv, make(0, [1, 1, 1, 1, 5, 5, 5, 5, 0]), 9)
    assert kv.lookup(make(1, [2, 2, 2, 2, 5, 5, 5, 5, 0])).num_tokens == 0
    assert kv.lookup(make(2, [5, 5, 5, 5, 0])).num_tokens == 0


def test_only_computed_tokens_are_published() -> None:
    kv = KVCacheManager(num_blocks=20, block_size=4)
    owner = make(0, list(range(12)))
    assert kv.allocate(owner, 12) is not None
    assert kv.lookup(make(1, list(range(12)))).num_tokens == 0
    kv.commit(owner, 7)
    assert kv.lookup(make(1, list(range(12)))).num_tokens == 4


def test_release_evicts_the_tail_of_a_prefix_first() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    owner = make(0, list(range(12)))
    computed(kv, owner, 12)
    kv.release(owner)
    kv.release(owner)  # without a table nothing happens
    assert kv.pool.num_free == 3
    computed(kv, make(1, [50, 51, 52]), 3)
    assert kv.lookup(make(2, [*range(12), 9])).num_tokens == 8


def test_can_hold_counts_revived_blocks_as_taken() -> None:
    kv = KVCacheManager(num_blocks=5, block_size=4)
    owner = make(0, list(range(8)))
    computed(kv, owner, 8)
    kv.release(owner)
    request = make(1, [*range(8), *range(20, 28)])  # 2 cached blocks and 2 new ones: the whole pool
    hit = kv.lookup(request)
    assert hit.num_tokens == 8
    assert kv.can_hold(16, hit, reserve=0)
    assert not kv.can_hold(16, hit, reserve=1)
    assert not kv.can_hold(17, hit, reserve=0)
    assert kv.allocate(request, 16, hit) is not None
    assert kv.pool.num_free == 0


def test_caching_off_publishes_and_finds_nothing() -> None:
    kv = KVCacheManager(num_blocks=20, block_size=4, enable_prefix_caching=False)
    computed(kv, make(0, list(range(12))), 12)
    assert kv.lookup(make(1, list(range(12)))).num_tokens == 0
    assert kv.pool.block_of == {}
