"""Steps of paged attention to check and to time: random q and cache, a shuffled block table, the backend's plan.

Owns: how such a step is made. Must not know: what is asked of it. Called by: the attention sections of check.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from harness import Context, raw
from torch import Tensor

from ropeway.attention.base import AttentionMetadata
from ropeway.attention.triton import TritonAttention
from ropeway_kernels.attention_plan import AttentionPlan
from ropeway_kernels.paged_attention import paged_attention


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype = torch.bfloat16
    block_size: int = 16


@dataclass
class Step:
    shape: Shape
    query_lens: list[int]
    seq_lens: list[int]
    q: Tensor  # [num_tokens, num_heads, head_dim]
    kv_layer: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim], a layer of two
    meta: AttentionMetadata  # not planned yet

    def plan(self, *, window: int | None = None, fixed_spans: bool = False) -> AttentionPlan:
        """As the backend makes it, on the device."""
        backend = TritonAttention(
            self.shape.block_size,
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            sliding_windows=(window,),
            kv_dtype=self.shape.cache,
            max_model_len=max(self.seq_lens),
            fixed_spans=fixed_spans,
        )
        plan: AttentionPlan = backend.prepare(self.meta).plan
        return plan

    def attend(
        self, plan: AttentionPlan, *, window: int | None = None, out: Tensor | None = None, **options: Any
    ) -> Tensor:
        """options: soft_cap, sinks."""
        meta = self.meta
        return paged_attention(
            self.q,
            self.kv_layer,
            meta.query_start_loc,
            meta.seq_lens,
            meta.block_table,
            plan,
            scale=self.shape.head_dim**-0.5,
            sliding_window=window,
            out=out,
            **options,
        )

    @property
    def kv_bytes(self) -> int:
        """Of K and V that the step must read, each once."""
        token = 2 * self.shape.num_kv_heads * self.shape.head_dim * self.shape.cache.itemsize
        return token * sum(self.seq_lens)

    @property
    def operations(self) -> int:
        """Multiplications and additions that the causal mask leaves, without any window."""
        visible = sum(
            count * (length - count) + count * (count + 1) // 2
            for count, length in zip(self.query_lens, self.seq_lens, strict=True)
        )
        return 4 * self.shape.num_heads * self.shape.head_dim * visible


def make_step(
    context: Context, shape: Shape, query_lens: list[int], seq_lens: list[int], *, spare: int = 3, salt: int = 0
) -> Step:
    """seq_lens count the queries; a row of length 0 is padding, whatever its queries. Blocks are shuffled over the whole pool.

    Blocks that no row owns hold NaN, block 0 too, and what lies behind a row's end in its last block is large: a wrong
    table or a missing mask cannot look right.
    """
    blocks_of = [-(-length // shape.block_size) for length in seq_lens]
    num_blocks = 1 + sum(blocks_of) + spare
    size = (num_blocks, 2, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    generator = context.generator(salt)
    device = context.device
    pool = torch.randn(size, generator=generator, device=device, dtype=_drawn(shape.cache)).to(shape.cache)
    free = 1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(context.seed + salt))
    table = torch.zeros(len(seq_lens), max([1, *blocks_of]), dtype=torch.int32)
    begin = 0
    for row, count in enumerate(blocks_of):
        table[row, :count] = free[begin : begin + count].int()
        begin += count
    layer = pool[:, 1]
    unused = torch.cat([torch.zeros(1, dtype=torch.int64), free[begin:]]).to(device)
    raw(layer)[unused] = raw(torch.full((1,), float("nan"), device=device).to(shape.cache))
    for row, length in enumerate(seq_lens):
        if length % shape.block_size:
            last = int(table[row, blocks_of[row] - 1])
            layer[last, :, :, length % shape.block_size :] = torch.full((1,), 100.0, device=device).to(shape.cache)
    num_tokens = sum(query_lens)
    q = torch.randn(
        num_tokens, shape.num_heads, shape.head_dim, generator=generator, device=device, dtype=_drawn(shape.dtype)
    ).to(shape.dtype)
    return Step(shape, query_lens, seq_lens, q, layer, metadata(table, query_lens, seq_lens, shape.block_size, device))


def metadata(
    table: Tensor, query_lens: list[int], seq_lens: list[int], block_size: int, device: torch.device
) -> AttentionMetadata:
    """table ``[num_reqs, max_blocks]`` int32 on the host."""
    host_query_lens = np.array(query_lens, dtype=np.int32)
    host_seq_lens = np.array(seq_lens, dtype=np.int32)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(host_query_lens)]).astype(np.int32))
    positions = torch.cat(
        [torch.arange(length - count, length) for count, length in zip(query_lens, seq_lens, strict=True)]
    )
    rows = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
    slots = table[rows, positions.clamp_min(0) // block_size].long() * block_size + positions % block_size
    slots[positions < 0] = -1  # padding
    return AttentionMetadata(
        query_start_loc=starts.to(device),
        seq_lens=torch.from_numpy(host_seq_lens).to(device),
        block_table=table.to(device),
        slot_mapping=slots.to(device),
        num_reqs=len(query_lens),
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        host_query_lens=host_query_lens,
        host_seq_lens=host_seq_lens,
    )


def _drawn(dtype: torch.dtype) -> torch.dtype:
    """The type to draw random numbers in: torch draws none in fp8."""
    return torch.bfloat16 if dtype.itemsize == 1 else dtype
