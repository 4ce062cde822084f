"""Copies whole KV blocks: copies on write, and blocks that move between the device and host memory.

Owns: the kernel. Must not know: why a block is copied, what is in it.
Called by: worker.runner, tests. Twin: reference.copy_blocks.

One kernel does both. Page-locked host memory is mapped into the device's address space, so the kernel reads or writes it
over the bus like its own, in stream order and with the pairs still on the device. A copy engine would leave the
multiprocessors to others, but wants one call from the host for each block and the pairs known to the host.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ropeway_kernels.aot import Variant

_TILE = 4096  # 32-bit words of a program: 8 loads of 16 bytes for each of its 128 threads


@triton.jit
def _copy_blocks(source, target, pairs, WORDS: tl.constexpr, TILE: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    begin = tl.load(pairs + 2 * pair) * WORDS
    to = tl.load(pairs + 2 * pair + 1) * WORDS
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = word < WORDS
    tl.store(target + to + word, tl.load(source + begin + word, mask=inside), mask=inside)


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """For each pair (from, to): ``target[to] = source[from]``.

    source and target ``[num_blocks, ...]``, contiguous, alike in type and in the shape of a block, whose size is a
    multiple of 16 bytes; they may be one tensor. pairs ``[n, 2]`` int64 contiguous, on the device that does the copying.
    No block may be written by one pair and read or written by another: pairs are not done in order. A tensor that is not
    on that device must be in page-locked host memory, and must not be touched before the stream gets here. Raises
    ValueError for other host memory.
    """
    block_bytes = math.prod(source.shape[1:]) * source.element_size()
    assert source.dtype == target.dtype
    assert source.shape[1:] == target.shape[1:]
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert pairs.dtype == torch.int64
    assert pairs.is_contiguous()
    assert block_bytes % 16 == 0
    for tensor in (source, target):
        if tensor.device != pairs.device and not tensor.is_pinned():
            raise ValueError(
                f"blocks on {tensor.device} cannot be reached from {pairs.device}: the memory is not pinned"
            )
    if pairs.shape[0] == 0:
        return
    words = block_bytes // 4
    grid = (pairs.shape[0], triton.cdiv(words, _TILE))
    _copy_blocks[grid](_as_words(source), _as_words(target), pairs, WORDS=words, TILE=_TILE, num_warps=4)


def _as_words(blocks: Tensor) -> Tensor:
    return blocks.view(blocks.shape[0], -1).view(torch.int32)


def variants() -> list[Variant]:
    """For the ahead-of-time check: blocks of a small and of a large model, and one that is less than a tile."""
    from ropeway_kernels.aot import Variant

    signature = {"source": "*i32", "target": "*i32", "pairs": "*i64", "WORDS": "constexpr", "TILE": "constexpr"}
    result = []
    for words in (1000, 30 * 2 * 3 * 16 * 64 // 2, 80 * 2 * 8 * 16 * 128 // 2):
        constants: dict[str, Any] = {"WORDS": words, "TILE": _TILE}
        result.append(Variant(f"{words}_words", _copy_blocks, signature, constants, num_warps=4))
    return result


__all__ = ["copy_blocks", "variants"]
