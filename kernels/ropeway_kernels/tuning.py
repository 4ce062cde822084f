"""The one table of tuned launch configurations: which tile sizes a kernel takes on which chip.

Owns: tile sizes, warps and stages per (architecture, head size, group, cache type). Must not know: kernels, plans; nothing
is searched at run time. Called by: paged_attention, and through it by the ahead-of-time check, which compiles every line.

The lines are reasoned, not yet measured: a tile of K and V of 16 to 32 KB keeps enough bytes in flight to cover the
latency of memory, the accumulator (tile_m x head size) stays below 64 registers a thread, and stages fill shared memory
as far as two blocks (decode) or one (prefill) on a multiprocessor allow. The check of registers and spills holds them to it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch

ARCHS = (80, 90, 100)
SPAN = 1024  # positions that the fixed-span mode reduces by themselves


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    tile_m: int  # rows of a product: queries x heads of a group; a power of two, at least 16
    tile_n: int  # KV positions of a tile, whatever the block size; a power of two, at least 16
    num_warps: int
    num_stages: int


Kind = Literal["prefill", "decode", "spans"]

# (kind, head size up to a power of two) -> a configuration per architecture, for types of one or two bytes.
# A loop's first stages go to the block ids, which must be there before K and V can be asked for: with 4 stages a loop has
# one tile under way and waits for all of it, with 5 it computes on one tile while another is still coming.
_TABLE: dict[tuple[Kind, int], dict[int, AttentionConfig]] = {
    ("prefill", 64): {
        80: AttentionConfig(128, 64, 8, 3),
        90: AttentionConfig(128, 64, 8, 3),
        100: AttentionConfig(128, 64, 8, 3),
    },
    ("prefill", 128): {
        80: AttentionConfig(128, 32, 8, 3),
        90: AttentionConfig(128, 64, 8, 3),
        100: AttentionConfig(128, 64, 8, 3),
    },
    ("prefill", 256): {
        80: AttentionConfig(64, 32, 8, 2),
        90: AttentionConfig(64, 32, 8, 2),
        100: AttentionConfig(64, 64, 8, 2),
    },
    ("decode", 64): {
        80: AttentionConfig(16, 64, 4, 5),
        90: AttentionConfig(16, 128, 4, 5),
        100: AttentionConfig(16, 64, 4, 5),
    },
    ("decode", 128): {
        80: AttentionConfig(16, 64, 4, 5),
        90: AttentionConfig(16, 64, 4, 5),
        100: AttentionConfig(16, 64, 4, 5),
    },
    ("decode", 256): {
        80: AttentionConfig(16, 32, 4, 5),
        90: AttentionConfig(16, 32, 4, 5),
        100: AttentionConfig(16, 32, 4, 5),
    },
    # Prompts and decoding rows share one line here, so that both reduce alike: see paged_attention.
    ("spans", 64): {
        80: AttentionConfig(64, 64, 8, 3),
        90: AttentionConfig(64, 64, 8, 3),
        100: AttentionConfig(64, 64, 8, 3),
    },
    ("spans", 128): {
        80: AttentionConfig(64, 32, 8, 2),
        90: AttentionConfig(64, 64, 8, 2),
        100: AttentionConfig(64, 64, 8, 2),
    },
    ("spans", 256): {
        80: AttentionConfig(32, 32, 8, 2),
        90: AttentionConfig(32, 32, 8, 2),
        100: AttentionConfig(32, 32, 8, 2),
    },
}


def nearest_arch(arch: int) -> int:
    """The tuned architecture to use on ``arch``: the nearest that is not newer, or the oldest."""
    return max((known for known in ARCHS if known <= arch), default=ARCHS[0])


@functools.cache
def attention_config(
    arch: int, head_dim: int, group: int, dtype: torch.dtype, *, decode: bool, spans: bool = False
) -> AttentionConfig:
    """arch: as 90 for compute capability 9.0; group: query heads per KV head; dtype: the KV cache's; spans: the line of
    the fixed-span mode, the same for both kernels. Raises ValueError for heads of more than 256 dimensions."""
    size = max(64, power_of_two(head_dim))
    if size > 256:
        raise ValueError(f"heads of {head_dim} dimensions: the Triton attention kernels go up to 256")
    kind: Kind = "spans" if spans else "decode" if decode else "prefill"
    config = _TABLE[kind, size][nearest_arch(arch)]
    if dtype.itemsize > 2:
        # float32 has no tensor cores: products take registers instead, so tiles are small.
        config = AttentionConfig(16 if kind == "decode" else 32, 32 if size < 256 else 16, 4, 2)
    return replace(config, tile_m=max(config.tile_m, power_of_two(group)))


@functools.cache
def current_arch() -> int:
    """Of the current CUDA device; 90 where there is none."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@functools.cache
def multiprocessors() -> int:
    """Of the current CUDA device; 4 where there is none, so that the interpreter has little to do."""
    if not torch.cuda.is_available():
        return 4
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def power_of_two(number: int) -> int:
    """The smallest that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()
