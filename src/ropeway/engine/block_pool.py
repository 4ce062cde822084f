"""The pool of KV blocks: who is referenced, what each one holds, which is reused next.

Owns: reference counts, the hash index, the free lists. Must not know: requests, tokens, tensors.
Called by: engine.kv_cache only.

    free, empty ──take──► referenced by n tables ──release──► free, empty
         ▲                    ▲          │ publish(hash)
         │ evicted (LRU)      │ share    ▼
         └──────────────── free but cached ◄── release

Block 0 is the null block: padding reads and writes go there, and nobody owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        """num_blocks counts the null block; at least 2."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks, not {num_blocks}")
        self.num_usable = num_blocks - 1
        self.ref_cnt = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack, so that low ids are reused while warm
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that take() can give, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def take(self, count: int) -> list[int]:
        """``count`` unshared blocks; the least recently used cached ones are evicted last of all. The caller has
        checked num_free."""
        blocks = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self.ref_cnt[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each: blocks found by hash, in use or merely cached."""
        for block in blocks:
            if self.ref_cnt[block] == 0:
                del self._cached[block]
            self.ref_cnt[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less. Blocks that nobody holds any more queue for reuse in the order given."""
        for block in blocks:
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                if self.hash_of[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let others find this full, computed block. When two requests computed the same content side by side, the
        first to publish is found and the other stays private."""
        if block_hash not in self.block_of:
            self.block_of[block_hash] = block
            self.hash_of[block] = block_hash

    def is_free(self, block: int) -> bool:
        return self.ref_cnt[block] == 0

    def reset(self) -> None:
        """Forget every cached block that no table holds, and unpublish those in use."""
        for block in self.block_of.values():
            self.hash_of[block] = None
        self.block_of.clear()
        self._empty.extend(self._cached)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        block_hash = self.hash_of[block]
        assert block_hash is not None
        del self.block_of[block_hash]
        self.hash_of[block] = None
