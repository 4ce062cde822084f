"""Paged attention in plain torch, on any device: batched, never a Python loop over requests.

Owns: the cache layout ``[num_blocks, 2, num_kv_heads, block_size, head_dim]`` and the plan of a step. Must not know:
requests, sampling, models. Called by: worker.runner (kv_shape, prepare), model.decoder (forward).

Every row is cut into tiles of up to 128 consecutive queries; a decoding row is a tile of one. Tiles of like size are
put into buckets, and a bucket is computed by a handful of batched operations: gather its K and V through the block
table, score, soften, sum. Buckets bound both the padding and the memory. All index arithmetic is done once per step and
shared by all layers with the same window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ropeway.attention.base import AttentionMetadata, AttentionSpec

_TILE = 128  # queries; bounds the scores, and skips most of what causality hides
_MAX_KV_ELEMENTS = 2**21  # gathered K elements of a bucket: 8 MB in float32, which stays in a CPU's last-level cache
_MAX_SCORES = 2**23  # query x KV pairs of a bucket over all heads
_BUCKET_OVERHEAD = 128  # padding, in KV tokens, that costs as much as running one more bucket
_KEPT_MASK = 2**20  # elements; a larger mask is cheaper to rebuild in each layer than to keep


@dataclass(slots=True)
class _Tiles:
    """Consecutive queries of one row each, as host columns ``[num_tiles]``."""

    row: np.ndarray
    first_token: np.ndarray  # index into the step's tokens
    num_queries: np.ndarray
    first_position: np.ndarray  # absolute position of the first query


@dataclass(slots=True)
class _Bucket:
    """Tiles computed together, padded to ``width`` queries and ``kv_len`` positions."""

    width: int
    kv_len: int
    tokens: Tensor  # [num_tiles, width] int64; the step's token of each query, padding repeats the tile's first
    positions: Tensor  # [num_tiles, width] int64; absolute position of each query
    kv_start: Tensor  # [num_tiles] int64; absolute position of the first gathered KV entry
    k_index: Tensor  # [num_tiles * num_kv_heads * num_blocks] rows of the cache seen as [rows, block_size * head_dim]
    v_index: Tensor  # same shape
    mask: Tensor | None = None  # see _mask
    v_slots: Tensor | None = None  # see _v_slots

    @property
    def num_tiles(self) -> int:
        return self.tokens.shape[0]


@dataclass(slots=True)
class _Plan:
    """What all layers of one step share. Indices depend on the cache's strides, known only when a layer is seen."""

    tiles: _Tiles
    block_table: np.ndarray  # [num_reqs, max_blocks]
    fresh_blocks: Tensor | None  # [n] int64; blocks begun in this step and not filled by it
    write_index: Tensor | None = None  # [num_tokens * 2 * num_kv_heads] rows of the cache seen as [rows, head_dim]
    buckets: dict[int | None, list[_Bucket]] = field(default_factory=dict)  # by sliding window


class TorchAttention:
    """The ``torch`` backend. Computes in float32 whatever the cache holds."""

    name = "torch"

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """``(num_blocks, 2, num_kv_heads, block_size, head_dim)``. A layer may be a view with any stride between
        blocks, as long as each block is contiguous; the cache must start as zeros."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def prepare(self, meta: AttentionMetadata) -> AttentionMetadata:
        starts = meta.query_start_loc.cpu().numpy().astype(np.int64)
        seq_lens = meta.seq_lens.cpu().numpy().astype(np.int64)
        query_lens = np.diff(starts)
        block_table = meta.block_table.cpu().numpy().astype(np.int64)

        tiles_per_row = -(-query_lens // _TILE)
        row = np.repeat(np.arange(meta.num_reqs), tiles_per_row)
        offset = (np.arange(len(row)) - np.repeat(np.cumsum(tiles_per_row) - tiles_per_row, tiles_per_row)) * _TILE
        tiles = _Tiles(
            row=row,
            first_token=starts[row] + offset,
            num_queries=np.minimum(query_lens[row] - offset, _TILE),
            first_position=(seq_lens - query_lens)[row] + offset,
        )
        # A block that is begun now may hold what an earlier owner left, and attention reads whole blocks: masked
        # entries weigh nothing, but nothing times NaN is NaN. So such a block is cleared before the first write to it.
        tail = seq_lens // self.block_size
        fresh = (seq_lens % self.block_size > 0) & (tail * self.block_size >= seq_lens - query_lens)
        fresh_blocks = None
        if fresh.any():
            ids = block_table[fresh, tail[fresh]]
            fresh_blocks = torch.from_numpy(ids).to(meta.slot_mapping.device)
        meta.plan = _Plan(tiles, block_table, fresh_blocks)
        return meta

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_layer: Tensor, meta: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        plan: _Plan = meta.plan
        self._write(k, v, kv_layer, meta.slot_mapping, plan)
        buckets = plan.buckets.get(spec.sliding_window)
        if buckets is None:
            buckets = plan.buckets[spec.sliding_window] = _make_buckets(plan, kv_layer, q, spec.sliding_window)
        out = torch.empty_like(q)
        for bucket in buckets:
            result = _attend(q, kv_layer, bucket, spec)  # [num_tiles, width, num_heads, head_dim]
            # Padding queries repeat the tile's first one, so whichever is written last, the value is the same.
            out.index_copy_(0, bucket.tokens.flatten(), result.flatten(0, 1).to(out.dtype))
        return out

    def _write(self, k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor, plan: _Plan) -> None:
        if plan.fresh_blocks is not None:
            kv_layer.index_fill_(0, plan.fresh_blocks, 0)
        _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
        if plan.write_index is None:
            planes = torch.arange(2 * num_kv_heads, device=slot_mapping.device) * block_size
            first = (slot_mapping // block_size) * (kv_layer.stride(0) // head_dim) + slot_mapping % block_size
            plan.write_index = (first[:, None] + planes).flatten()
        rows = torch.stack((k, v), dim=1).view(-1, head_dim)  # [num_tokens * 2 * num_kv_heads, head_dim]
        _as_rows(kv_layer, head_dim).index_copy_(0, plan.write_index, rows.to(kv_layer.dtype))


def _as_rows(kv_layer: Tensor, width: int) -> Tensor:
    """The layer's memory, from its first block to its last, as ``[rows, width]``. Rows between its blocks belong to
    other layers and are never indexed. One gather on this view fetches [tiles, heads, blocks] in the order wanted."""
    num_blocks, block_elements, stride = kv_layer.shape[0], kv_layer[0].numel(), kv_layer.stride(0)
    assert kv_layer[0].is_contiguous(), "each block of a layer must be contiguous"
    assert stride % width == 0, "blocks must lie a whole number of rows apart"
    return kv_layer.as_strided((((num_blocks - 1) * stride + block_elements) // width, width), (width, 1))


def _make_buckets(plan: _Plan, kv_layer: Tensor, q: Tensor, window: int | None) -> list[_Bucket]:
    """Cut the tiles, sorted by size, into buckets of bounded memory and padding."""
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    num_heads = q.shape[1]
    tiles = plan.tiles
    # The blocks a tile reads: from the one that holds the oldest position in any query's window, to its last query's.
    first_block = np.zeros_like(tiles.row)
    if window is not None:
        first_block = np.maximum(tiles.first_position - window + 1, 0) // block_size
    num_blocks = (tiles.first_position + tiles.num_queries - 1) // block_size + 1 - first_block
    # Widths 1, 4, 16, 64, 128: a decode tile never pays for a prefill one.
    width_class = np.searchsorted([1, 4, 16, 64], tiles.num_queries)
    order = np.lexsort((num_blocks, width_class))

    units = kv_layer.stride(0) // (block_size * head_dim)  # cache rows from one block to the next
    heads = np.arange(num_kv_heads)[None, :, None]
    buckets = []
    for members in _cut(
        order, width_class, num_blocks * block_size, tiles.num_queries, num_kv_heads * head_dim, num_heads
    ):
        width, blocks = int(tiles.num_queries[members].max()), int(num_blocks[members].max())
        query = np.arange(width)
        query = np.where(query < tiles.num_queries[members][:, None], query, 0)  # [num_tiles, width]
        columns = first_block[members][:, None] + np.arange(blocks)  # [num_tiles, blocks]
        columns = np.minimum(columns, plan.block_table.shape[1] - 1)  # padding; its positions are past every query
        table = plan.block_table[tiles.row[members][:, None], columns]
        index = table[:, None, :] * units + heads  # [num_tiles, num_kv_heads, blocks]
        k_index = torch.from_numpy(index.reshape(-1)).to(q.device)
        buckets.append(
            _Bucket(
                width=width,
                kv_len=blocks * block_size,
                tokens=torch.from_numpy(tiles.first_token[members][:, None] + query).to(q.device),
                positions=torch.from_numpy(tiles.first_position[members][:, None] + query).to(q.device),
                kv_start=torch.from_numpy(first_block[members] * block_size).to(q.device),
                k_index=k_index,
                v_index=k_index + num_kv_heads,
            )
        )
    return buckets


def _cut(
    order: np.ndarray, width_class: np.ndarray, kv_lens: np.ndarray, widths: np.ndarray, kv_width: int, num_heads: int
) -> list[np.ndarray]:
    """Split the sorted tiles where the width class changes, memory would be exceeded, or padding outgrows a launch."""
    groups, begin, used = [], 0, 0
    classes, lens, queries = width_class[order].tolist(), kv_lens[order].tolist(), widths[order].tolist()
    widest = 0
    for end in range(len(order)):
        count = end - begin + 1
        widest = max(widest, queries[end])
        padded = count * lens[end]  # sorted: the newest is the longest
        waste = padded - used - lens[end]
        if end > begin and (
            classes[end] != classes[begin]
            or padded * kv_width > _MAX_KV_ELEMENTS
            or padded * widest * num_heads > _MAX_SCORES
            or waste > _BUCKET_OVERHEAD + used // 4
        ):
            groups.append(order[begin:end])
            begin, used, widest = end, 0, queries[end]
        used += lens[end]
    groups.append(order[begin:])
    return groups


def _attend(q: Tensor, kv_layer: Tensor, bucket: _Bucket, spec: AttentionSpec) -> Tensor:
    """One bucket; returns ``[num_tiles, width, num_heads, head_dim]`` float32.

    Query heads that share a KV head are folded beside the queries, so K and V are never repeated.
    """
    num_tiles, width, kv_len = bucket.num_tiles, bucket.width, bucket.kv_len
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_layer.shape[2:4]
    group, batch = num_heads // num_kv_heads, num_tiles * num_kv_heads
    blocks = _as_rows(kv_layer, block_size * head_dim)

    def gather(index: Tensor) -> Tensor:
        return blocks.index_select(0, index).view(batch, kv_len, head_dim).float()

    k = gather(bucket.k_index)
    queries = q.index_select(0, bucket.tokens.flatten()).float()
    queries = queries.view(num_tiles, width, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(batch, group, width, head_dim)
    mask = _mask(bucket, num_kv_heads, spec.sliding_window)  # [batch, 1, width, kv_len]
    if width > 1 and spec.soft_cap is None:
        k, v = (x[:, None].expand(batch, group, kv_len, head_dim) for x in (k, gather(bucket.v_index)))
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=spec.scale)
    else:
        scores = torch.bmm(queries.flatten(1, 2), k.transpose(1, 2)).view(batch, group, width, kv_len).mul_(spec.scale)
        if spec.soft_cap is not None:
            scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
        weights = scores.add_(mask).softmax(-1)
        if width == 1 and kv_layer.dtype == torch.float32 and not kv_layer.is_cuda:
            # One query per head: summing V where it lies is cheaper than gathering it first.
            slots = _v_slots(bucket, num_kv_heads, group, block_size)
            out = F.embedding_bag(
                slots, _as_rows(kv_layer, head_dim), mode="sum", per_sample_weights=weights.view(-1, kv_len)
            )
        else:
            out = torch.bmm(weights.view(batch, group * width, kv_len), gather(bucket.v_index))
    out = out.view(num_tiles, num_kv_heads, group, width, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_tiles, width, num_heads, head_dim)


def _v_slots(bucket: _Bucket, num_kv_heads: int, group: int, block_size: int) -> Tensor:
    """``[num_tiles * num_heads, kv_len]`` rows of the cache seen as [rows, head_dim]: each query head's V entries."""
    if bucket.v_slots is None:
        offsets = torch.arange(block_size, device=bucket.v_index.device)
        slots = (bucket.v_index[:, None] * block_size + offsets).view(-1, 1, bucket.kv_len)
        bucket.v_slots = slots.expand(-1, group, -1).reshape(-1, bucket.kv_len)
    return bucket.v_slots


def _mask(bucket: _Bucket, num_kv_heads: int, window: int | None) -> Tensor:
    """``[num_tiles * num_kv_heads, 1, width, kv_len]`` float32: 0 where a query may look, -inf elsewhere.

    Every query sees at least itself, so no line of it is all -inf and softmax cannot make a NaN.
    """
    if bucket.mask is not None:
        return bucket.mask
    kv = bucket.kv_start[:, None] + torch.arange(bucket.kv_len, device=bucket.kv_start.device)  # [num_tiles, kv_len]
    ahead = kv[:, None, :] - bucket.positions[:, :, None]  # [num_tiles, width, kv_len]
    hidden = ahead > 0
    if window is not None:
        hidden |= ahead <= -window
    mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
    num_tiles, width, kv_len = mask.shape
    mask = mask[:, None].expand(num_tiles, num_kv_heads, width, kv_len).reshape(-1, 1, width, kv_len)
    if mask.numel() <= _KEPT_MASK:
        bucket.mask = mask
    return mask


__all__ = ["TorchAttention"]
