from __future__ import annotations

import hashlib

from ropeway.hashing import chain_hash, root_hash


def test_a_block_is_named_by_its_tokens_and_all_before_it() -> None:
    a, b = chain_hash(b"", [1, 2]), chain_hash(b"", [1, 3])
    assert a != b
    assert chain_hash(a, [5, 6]) != chain_hash(b, [5, 6])
    assert chain_hash(a, [5, 6]) == chain_hash(a, [5, 6])
    assert len(a) == hashlib.sha256().digest_size


def test_salts_separate_and_the_empty_salt_is_the_common_one() -> None:
    assert root_hash("") == b""
    assert len({root_hash("a"), root_hash("b"), root_hash("")}) == 3
    assert root_hash("\ud800") != root_hash("")  # a lone surrogate is hashed, not a crash
