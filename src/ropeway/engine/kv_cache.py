"""Block tables: which blocks hold a request's KV, and which of them others may share.

Owns: every block table, and what of it is published. Must not know: scheduling order, devices, text.
Called by: the scheduler only.

A table always holds exactly the blocks that the request's computed tokens need, the current step's included: it grows
by blocks on demand, is append-only, and is released tail first so that shared beginnings are evicted last.

Sliding-window layers share the one table of their request, so blocks behind the window are kept as long as the request
runs. In models that mix windows with full attention (Gemma 3) the full layers need those blocks anyway; giving the
window layers a table of their own, which does release them, needs a second block group in the runner.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropeway.engine.block_pool import BlockPool
from ropeway.engine.request import Request
from ropeway.hashing import chain_hash, root_hash


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks, in order, that already hold the KV of a request's first ``num_tokens`` tokens."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    tail: int | None = None  # another's block: a copy of it, behind block_ids, holds the last of them


NO_HIT = PrefixHit()


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        """num_blocks counts the null block."""
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tables: dict[int, list[int]] = {}
        self._num_published: dict[int, int] = {}

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, request: Request) -> PrefixHit:
        """The longest published prefix. Pure. Never covers the last known token: its logits must be computed."""
        if not self.enable_prefix_caching or request.needs_every_prompt_token:
            return NO_HIT
        limit = (len(request.token_ids) - 1) // self.block_size
        self._extend_hashes(request, limit)
        block_of = self.pool.block_of
        blocks = []
        for block_hash in request.block_hashes[:limit]:
            block = block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return PrefixHit(tuple(blocks), len(blocks) * self.block_size)

    def fork(self, parent: Request) -> PrefixHit:
        """All that a request with the same prompt can take over from ``parent``, which has computed it: the prompt
        without its last token, which it computes itself for the sake of the logits."""
        num_tokens = parent.num_prompt_tokens - 1
        table, num_full = self.tables[parent.request_id], num_tokens // self.block_size
        is_cut = num_tokens % self.block_size > 0
        return PrefixHit(tuple(table[:num_full]), num_tokens, table[num_full] if is_cut else None)

    def can_hold(self, num_tokens: int, prefix: PrefixHit, reserve: int) -> bool:
        """Whether a table of num_tokens that begins with prefix could be made now, leaving ``reserve`` blocks free."""
        reused_free = sum(1 for block in prefix.block_ids if self.pool.is_free(block))
        needed = self.blocks_for(num_tokens) - len(prefix.block_ids) + reused_free
        return needed + reserve <= self.pool.num_free

    def allocate(self, request: Request, num_tokens: int, prefix: PrefixHit = NO_HIT) -> list[int] | None:
        """Grow the request's table to hold num_tokens; returns the appended blocks, or None and changes nothing."""
        table = self.tables.get(request.request_id)
        if table is None:
            if not self.can_hold(num_tokens, prefix, 0):
                return None
            self.pool.share(prefix.block_ids)
            table = self.tables[request.request_id] = list(prefix.block_ids)
            self._num_published[request.request_id] = len(table)  # a fork's are its parent's to publish
            new = self.pool.take(self.blocks_for(num_tokens) - len(table))
            table += new
            return table
        count = -(-num_tokens // self.block_size) - len(table)
        if count > self.pool.num_free:
            return None
        new = self.pool.take(count)
        table += new
        return new

    def commit(self, request: Request, num_tokens: int) -> None:
        """Publish the full blocks among the first num_tokens tokens, which are known and computed."""
        if not self.enable_prefix_caching:
            return
        num_full = num_tokens // self.block_size
        first = self._num_published[request.request_id]
        if num_full <= first:
            return
        self._extend_hashes(request, num_full)
        table = self.tables[request.request_id]
        for index in range(first, num_full):
            self.pool.publish(table[index], request.block_hashes[index])
        self._num_published[request.request_id] = num_full

    def release(self, request: Request) -> None:
        """Give up the request's table, tail first. Without a table nothing happens."""
        table = self.tables.pop(request.request_id, None)
        if table is not None:
            del self._num_published[request.request_id]
            self.pool.release(reversed(table))

    def reset_prefix_cache(self) -> None:
        self.pool.reset()

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        hashes = request.block_hashes
        size = self.block_size
        parent = hashes[-1] if hashes else root_hash(request.cache_salt)
        for index in range(len(hashes), num_blocks):
            parent = chain_hash(parent, request.token_ids[index * size : (index + 1) * size])
            hashes.append(parent)
