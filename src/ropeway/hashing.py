"""Identity of a KV block: a hash chained over everything that its content depends on.

Owns: chain_hash. Must not know: who stores the hashes. Called by: engine.kv_cache.

A block's KV depends on every token before it, so its hash covers its parent's. The hash is cryptographic: with a weak
one a client could craft a prompt that collides with another's and read that user's KV.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

ROOT = b""


def root_hash(cache_salt: str) -> bytes:
    """Parent of a request's first block. Different salts never share a block."""
    return sha256(cache_salt.encode("utf-8", "surrogatepass")).digest() if cache_salt else ROOT


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the parent's hash and the block's tokens as native int32. All blocks of a pool are equally long, so
    the encoding is unambiguous. On CPUs with SHA instructions this is the fastest cryptographic hash at hand."""
    return sha256(parent + struct.pack(f"{len(token_ids)}i", *token_ids)).digest()
