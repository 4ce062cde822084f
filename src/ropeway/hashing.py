"""Identity of a KV block: a hash chained over everything that its content depends on.

Owns: chain_hash. Must not know: who stores the hashes. Called by: engine.kv_cache.

A block's KV depends on every token before it, so its hash covers its parent's. The hash is cryptographic: with a weak
one a client could craft a prompt that collides with another's and read that user's KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ROOT = b""


def root_hash(cache_salt: str) -> bytes:
    """Parent of a request's first block. Different salts never share a block."""
    return blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=16).digest() if cache_salt else ROOT


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """128-bit BLAKE2b over the raw little-endian int32 tokens of one block, keyed by its parent's hash."""
    return blake2b(array("i", token_ids), digest_size=16, key=parent).digest()
