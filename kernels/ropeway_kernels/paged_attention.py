"""Paged attention of ragged, mixed batches: kernels and launches.

Owns: what happens with a share of the work; attention_plan cuts it. Must not know: ropeway, layers, how K and V came into
the cache. Called by: ropeway.attention.triton (once per layer), the ahead-of-time check.

A *query tile* is some consecutive queries of one row with all query heads of one KV head, packed into the rows of a
product: row r of the tile is query ``r // group`` and head ``r % group``. KV is walked in tiles of ``tile_n`` positions,
which start at absolute multiples of it; each position finds its block by itself, so tile_n has nothing to do with the
block size. Two kernels share that walk:

* *prefill*: one program per query tile and KV head. Tiles that all queries see whole run without masks; those at the
  diagonal, at the window's edge and at the end run with them.
* *decode*, for rows of few queries: the list (row, KV head, unit of KV) is laid out flat and cut into equal shares, one
  per program, whose number is fixed. A row's head that lies within one share is written at once. What a share's edge has
  cut leaves partial results (maximum, sum, weighted sum) that a *merge* kernel joins, in the order of their positions.

The plan is one int32 array whose length follows from the number of rows and programs, so that a CUDA graph can read it
from a fixed place; grids follow from the same numbers. Rows with seq_len 0 are no work and their output is zeros.

**Fixed spans.** A unit is a tile, or in this mode a span of 1,024 positions at absolute multiples. Then both kernels use
the same tile sizes, reduce each span by itself and join the spans in order, whoever computes them, and products and sums
are not contracted to fused ones. A query's result is then a function of its own q, its row's K and V and its position
alone: the same bits whatever else is in the batch, however the prompt was cut into chunks, whether it decodes or
prefills. That rests on one property of the hardware which Triton does not state: that a row of a matrix product does
not depend on the product's other rows or on where it stands among them. It holds per chip, Triton version and tuning
table, not across them. Without fixed spans a row's result depends, in its last bits, on where the shares are cut.

**Numbers.** Scores are float32; the softmax is in base 2, where scale and log2(e) are one factor inside the multiply-add
that subtracts the maximum, which costs what pre-scaling q would but does not round q again. Weights are rounded to q's
type before they meet V. Running maxima begin at a large negative number instead of -inf, so that a tile which hides
everything from a query changes nothing and no NaN can arise. An fp8 (e4m3) cache is converted to q's type after loading;
each tile's product is then summed apart and added to the running sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropeway_kernels.aot import Variant
from ropeway_kernels.attention_plan import AttentionPlan
from ropeway_kernels.tuning import ARCHS, SPAN, AttentionConfig, attention_config, power_of_two

_LOG2E = math.log2(math.e)
# Interpreted kernels compute with numpy, which has no bfloat16: there, products take float32 copies of rounded operands.
_INTERPRETED = bool(triton.knobs.runtime.interpret)

# --- the kernels ------------------------------------------------------------------------------------------------------
#
# Names: `peak` running maximum of raw scores, `total` running sum of weights, `acc` running weighted sum of V, all float32.
# `base` turns a raw score into one of base 2; with a soft cap, `inner` does so inside the tanh and `base` outside.


@triton.jit
def _walk(
    q,
    query_pos,
    peak,
    total,
    acc,
    kv_ptr,
    table_ptr,
    begin,
    end,
    low,
    high,
    window,
    inner,
    base,
    stride_block,
    v_offset,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
):
    """Tiles ``begin`` to ``end`` of one KV head. Masked: only positions from ``low`` up to ``high`` are touched, and each
    query sees those up to its own and within its window."""
    PRECISION: tl.constexpr = "ieee" if DTYPE == tl.float32 else "tf32"  # noqa: SIM300
    d = tl.arange(0, BLOCK_D)
    for tile in range(begin, end):
        pos = tile * TILE_N + tl.arange(0, TILE_N)
        if MASKED:
            inside = (pos >= low) & (pos < high)
            block = tl.load(table_ptr + pos // BLOCK_SIZE, mask=inside, other=0)
        else:
            block = tl.load(table_ptr + pos // BLOCK_SIZE)
        # One id per position, and whole vectors over the head's dimensions.
        at = block.to(tl.int64) * stride_block + (pos % BLOCK_SIZE) * HEAD_DIM
        k_ptr = kv_ptr + at[:, None] + d[None, :]
        if MASKED:
            # V too: what lies beyond may be NaN, and a weight of zero would not silence it.
            loaded = inside[:, None]
            if HEAD_DIM != BLOCK_D:
                loaded = loaded & (d < HEAD_DIM)[None, :]
            k = tl.load(k_ptr, mask=loaded, other=0.0)
            v = tl.load(k_ptr + v_offset, mask=loaded, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            k = tl.load(k_ptr, mask=(d < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(k_ptr + v_offset, mask=(d < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_ptr)
            v = tl.load(k_ptr + v_offset)
        k = k.to(DTYPE)
        v = v.to(DTYPE)
        if WIDE:
            k = k.to(tl.float32)
            v = v.to(tl.float32)

        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFT_CAP:
            e = tl.exp2(tl.abs(s) * (-2.0 * inner))  # of the absolute value: cannot overflow
            t = (1.0 - e) / (1.0 + e)
            s = tl.where(s < 0, -t, t)
        if MASKED:
            seen = pos[None, :] <= query_pos[:, None]
            if WINDOW:
                seen = seen & (pos[None, :] > query_pos[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(peak, tl.max(s, 1))
        p = tl.exp2(s * base - (top * base)[:, None])
        shrink = tl.exp2((peak - top) * base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        p = p.to(DTYPE)
        if WIDE:
            p = p.to(tl.float32)
        if TWO_LEVEL:
            # The bound keeps Triton from folding the sum into the product; with these types it means nothing else.
            acc += tl.dot(p, v, input_precision=PRECISION, max_num_imprecise_acc=TILE_N)
        else:
            acc = tl.dot(p, v, acc, input_precision=PRECISION)
        peak = top
    return peak, total, acc


@triton.jit
def _walk_range(
    q,
    query_pos,
    peak,
    total,
    acc,
    kv_ptr,
    table_ptr,
    begin,
    end,
    low,
    high,
    first_pos,
    window,
    inner,
    base,
    stride_block,
    v_offset,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
):
    """`_walk` over ``begin`` to ``end`` with masks only where some query does not see a whole tile."""
    # Seen whole by all: tiles that end by the first query's own position and begin within the last query's window.
    full_end = tl.minimum(tl.maximum((first_pos + 1) // TILE_N, begin), end)
    full_begin = begin
    if WINDOW:
        edge = tl.maximum(high - window, 0)
        full_begin = tl.minimum(tl.maximum((edge + TILE_N - 1) // TILE_N, begin), end)
        peak, total, acc = _walk(
            q, query_pos, peak, total, acc, kv_ptr, table_ptr, begin, full_begin, low, high, window, inner, base, stride_block,
            v_offset, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_N, WINDOW, SOFT_CAP, True, DTYPE, WIDE, TWO_LEVEL,
        )  # fmt: skip
        full_end = tl.maximum(full_end, full_begin)
    peak, total, acc = _walk(
        q, query_pos, peak, total, acc, kv_ptr, table_ptr, full_begin, full_end, low, high, window, inner, base, stride_block,
        v_offset, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_N, WINDOW, SOFT_CAP, False, DTYPE, WIDE, TWO_LEVEL,
    )  # fmt: skip
    peak, total, acc = _walk(
        q, query_pos, peak, total, acc, kv_ptr, table_ptr, full_end, end, low, high, window, inner, base, stride_block,
        v_offset, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_N, WINDOW, SOFT_CAP, True, DTYPE, WIDE, TWO_LEVEL,
    )  # fmt: skip
    return peak, total, acc


@triton.jit
def _joined(peak, total, peak_part, total_part, base):
    """Running and partial softmax as one: its maximum and sum, and by what each one's weighted sum is to be multiplied."""
    top = tl.maximum(peak, peak_part)
    keep = tl.exp2((peak - top) * base)
    take = tl.exp2((peak_part - top) * base)
    return top, total * keep + total_part * take, keep, take


@triton.jit
def _final_factor(peak, total, sinks_ptr, heads, base, SINKS: tl.constexpr):
    """By what the weighted sum is to be multiplied to be the output; 0 for a query that saw nothing."""
    if SINKS:
        sink = tl.load(sinks_ptr + heads).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(peak * base, sink)
        shrink = tl.exp2(peak * base - top)
        return shrink / (total * shrink + tl.exp2(sink - top))
    else:
        return 1.0 / tl.where(total > 0, total, 1.0)


@triton.jit(do_not_specialize=["tiles_at", "num_tiles", "window", "stride_table"])
def _prefill_kernel(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    kv_ptr,  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    out_ptr,  # as q
    sinks_ptr,  # [num_heads]
    plan_ptr,
    starts_ptr,  # query_start_loc [num_reqs + 1]
    seq_lens_ptr,  # [num_reqs]
    table_ptr,  # [num_reqs, max_blocks]
    tiles_at,
    num_tiles,
    window,
    inner,
    base,
    stride_q,
    stride_out,
    stride_block,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    WIDE: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
):
    """Grid (query tiles, KV heads)."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.load(plan_ptr + tiles_at + tl.program_id(0))
    first = tl.load(plan_ptr + tiles_at + num_tiles + tl.program_id(0))
    kv_head = tl.program_id(1)
    start = tl.load(starts_ptr + row)
    num_queries = tl.load(starts_ptr + row + 1) - start - first
    first_pos = tl.load(seq_lens_ptr + row) - num_queries
    num_queries = tl.minimum(num_queries, TILE_M // GROUP)

    r = tl.arange(0, TILE_M)
    d = tl.arange(0, BLOCK_D)
    query = r // GROUP
    heads = kv_head * GROUP + r % GROUP
    valid = (query < num_queries)[:, None] & (d < HEAD_DIM)[None, :]
    token = (start + first + query).to(tl.int64)
    within = (heads * HEAD_DIM)[:, None] + d[None, :]
    q = tl.load(q_ptr + (token * stride_q)[:, None] + within, mask=valid, other=0.0)
    if WIDE:
        q = q.to(tl.float32)

    high = first_pos + num_queries
    low = 0
    if WINDOW:
        low = tl.maximum(first_pos - window + 1, 0)
    query_pos = first_pos + query
    table = table_ptr + row.to(tl.int64) * stride_table
    kv = kv_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    v_offset = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    begin = low // TILE_N
    end = (high + TILE_N - 1) // TILE_N
    peak = tl.full([TILE_M], -1.0e30, tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, BLOCK_D], tl.float32)
    if SPAN == 0:
        peak, total, acc = _walk_range(
            q, query_pos, peak, total, acc, kv, table, begin, end, low, high, first_pos, window, inner, base, stride_block,
            v_offset, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_N, WINDOW, SOFT_CAP, DTYPE, WIDE, TWO_LEVEL,
        )  # fmt: skip
    else:
        for span in range(low // SPAN, (high + SPAN - 1) // SPAN):
            span_begin = tl.maximum(span * (SPAN // TILE_N), begin)
            span_end = tl.minimum((span + 1) * (SPAN // TILE_N), end)
            peak_part = tl.full([TILE_M], -1.0e30, tl.float32)
            total_part = tl.zeros([TILE_M], tl.float32)
            acc_part = tl.zeros([TILE_M, BLOCK_D], tl.float32)
            peak_part, total_part, acc_part = _walk_range(
                q, query_pos, peak_part, total_part, acc_part, kv, table, span_begin, span_end, low, high, first_pos, window,
                inner, base, stride_block, v_offset, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_N, WINDOW, SOFT_CAP, DTYPE,
                WIDE, TWO_LEVEL,
            )  # fmt: skip
            peak, total, keep, take = _joined(peak, total, peak_part, total_part, base)
            acc = acc * keep[:, None] + acc_part * take[:, None]
    result = acc * _final_factor(peak, total, sinks_ptr, heads, base, SINKS)[:, None]
    tl.store(out_ptr + (token * stride_out)[:, None] + within, result.to(DTYPE), mask=valid)


@triton.jit(do_not_specialize=["section", "num_tiles", "slot_rows", "window", "stride_table"])
def _decode_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    sinks_ptr,
    part_acc_ptr,  # [num_slots, slot_rows, BLOCK_D]
    part_ml_ptr,  # [num_slots, slot_rows, 2]
    plan_ptr,
    starts_ptr,
    seq_lens_ptr,
    table_ptr,
    section,
    num_tiles,
    slot_rows,
    window,
    inner,
    base,
    stride_q,
    stride_out,
    stride_block,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    WIDE: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
):
    """Grid (programs): each walks its share, item by item. A decode tile is all queries of its row."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    UNIT: tl.constexpr = TILE_N if SPAN == 0 else SPAN
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    units_ptr = plan_ptr + section
    share_ptr = units_ptr + num_tiles + 1 + program * 6
    r = tl.arange(0, TILE_M)
    d = tl.arange(0, BLOCK_D)
    query = r // GROUP
    v_offset = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM

    # Rows without work belong to no share; their output is zeros.
    for idle in range(program, num_tiles, num_programs):
        if tl.load(units_ptr + idle) == tl.load(units_ptr + idle + 1):
            idle_row = tl.load(plan_ptr + idle)
            idle_start = tl.load(starts_ptr + idle_row)
            idle_queries = tl.load(starts_ptr + idle_row + 1) - idle_start
            nothing = tl.zeros([TILE_M, BLOCK_D], DTYPE)
            idle_mask = (query < idle_queries)[:, None] & (d < HEAD_DIM)[None, :]
            idle_rows = out_ptr + ((idle_start + query).to(tl.int64) * stride_out)[:, None] + d[None, :]
            for kv_head in range(0, NUM_KV_HEADS):
                idle_heads = (kv_head * GROUP + r % GROUP) * HEAD_DIM
                tl.store(idle_rows + idle_heads[:, None], nothing, mask=idle_mask)

    tile = tl.load(share_ptr)
    head = tl.load(share_ptr + 1)
    unit = tl.load(share_ptr + 2)
    left = tl.load(share_ptr + 3)
    while left > 0:
        units = tl.load(units_ptr + tile + 1) - tl.load(units_ptr + tile)
        count = tl.minimum(units - unit, left)
        if count > 0:
            row = tl.load(plan_ptr + tile)
            start = tl.load(starts_ptr + row)
            num_queries = tl.load(starts_ptr + row + 1) - start
            high = tl.load(seq_lens_ptr + row)
            first_pos = high - num_queries
            low = 0
            if WINDOW:
                low = tl.maximum(first_pos - window + 1, 0)
            heads = head * GROUP + r % GROUP
            valid = (query < num_queries)[:, None] & (d < HEAD_DIM)[None, :]
            token = (start + query).to(tl.int64)
            within = (heads * HEAD_DIM)[:, None] + d[None, :]
            q = tl.load(q_ptr + (token * stride_q)[:, None] + within, mask=valid, other=0.0)
            if WIDE:
                q = q.to(tl.float32)
            query_pos = first_pos + query
            table = table_ptr + row.to(tl.int64) * stride_table
            kv = kv_ptr + head * (BLOCK_SIZE * HEAD_DIM)
            slot = tl.load(share_ptr + tl.where(unit > 0, 4, 5))
            peak = tl.full([TILE_M], -1.0e30, tl.float32)
            total = tl.zeros([TILE_M], tl.float32)
            acc = tl.zeros([TILE_M, BLOCK_D], tl.float32)
            first_unit = low // UNIT + unit
            if SPAN == 0:
                # Masks everywhere: they cost little beside the loads, and a second loop would empty the pipeline.
                peak, total, acc = _walk(
                    q, query_pos, peak, total, acc, kv, table, first_unit, first_unit + count, low, high, window, inner, base,
                    stride_block, v_offset, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_N, WINDOW, SOFT_CAP, True, DTYPE, WIDE,
                    TWO_LEVEL,
                )  # fmt: skip
                if count < units:
                    at = slot * slot_rows + r
                    mine = query < num_queries
                    tl.store(part_acc_ptr + (at * BLOCK_D)[:, None] + d[None, :], acc, mask=mine[:, None])
                    tl.store(part_ml_ptr + at * 2, peak, mask=mine)
                    tl.store(part_ml_ptr + at * 2 + 1, total, mask=mine)
            else:
                for span in range(first_unit, first_unit + count):
                    span_begin = tl.maximum(span * (SPAN // TILE_N), low // TILE_N)
                    span_end = tl.minimum((span + 1) * (SPAN // TILE_N), (high + TILE_N - 1) // TILE_N)
                    peak_part = tl.full([TILE_M], -1.0e30, tl.float32)
                    total_part = tl.zeros([TILE_M], tl.float32)
                    acc_part = tl.zeros([TILE_M, BLOCK_D], tl.float32)
                    peak_part, total_part, acc_part = _walk_range(
                        q, query_pos, peak_part, total_part, acc_part, kv, table, span_begin, span_end, low, high, first_pos,
                        window, inner, base, stride_block, v_offset, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_N, WINDOW,
                        SOFT_CAP, DTYPE, WIDE, TWO_LEVEL,
                    )  # fmt: skip
                    if count < units:
                        at = (slot + span - low // SPAN) * slot_rows + r
                        mine = query < num_queries
                        tl.store(part_acc_ptr + (at * BLOCK_D)[:, None] + d[None, :], acc_part, mask=mine[:, None])
                        tl.store(part_ml_ptr + at * 2, peak_part, mask=mine)
                        tl.store(part_ml_ptr + at * 2 + 1, total_part, mask=mine)
                    peak, total, keep, take = _joined(peak, total, peak_part, total_part, base)
                    acc = acc * keep[:, None] + acc_part * take[:, None]
            if count == units:
                result = acc * _final_factor(peak, total, sinks_ptr, heads, base, SINKS)[:, None]
                tl.store(out_ptr + (token * stride_out)[:, None] + within, result.to(DTYPE), mask=valid)
        left -= count
        unit = 0
        is_last_head = (head + 1 == NUM_KV_HEADS) | (units == 0)
        tile = tl.where(is_last_head, tile + 1, tile)
        head = tl.where(is_last_head, 0, head + 1)


@triton.jit(do_not_specialize=["section", "num_tiles"])
def _merge_kernel(
    out_ptr,
    sinks_ptr,
    part_acc_ptr,
    part_ml_ptr,
    plan_ptr,
    starts_ptr,
    section,
    num_tiles,
    base,
    stride_out,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid (programs of the decode kernel, rows of a slot): one query and head of one item that was cut."""
    entry_ptr = plan_ptr + section + num_tiles + 1 + tl.num_programs(0) * 6 + tl.program_id(0) * 4
    r = tl.program_id(1)
    count = tl.load(entry_ptr + 3)
    if count > 0:
        row = tl.load(plan_ptr + tl.load(entry_ptr))
        start = tl.load(starts_ptr + row)
        num_queries = tl.load(starts_ptr + row + 1) - start
        query = r // GROUP
        if query < num_queries:
            head = tl.load(entry_ptr + 1) * GROUP + r % GROUP
            first_slot = tl.load(entry_ptr + 2)
            d = tl.arange(0, BLOCK_D)
            peak = -1.0e30
            total = 0.0
            acc = tl.zeros([BLOCK_D], tl.float32)
            # Four loads at a time are under way. The last part stands in for absent ones, at a weight of nothing.
            for begin in range(0, count, 4):
                for offset in tl.static_range(4):
                    part = tl.minimum(begin + offset, count - 1)
                    at = (first_slot + part) * tl.num_programs(1) + r
                    peak_part = tl.load(part_ml_ptr + at * 2)
                    peak_part = tl.where(begin + offset < count, peak_part, -1.0e30)
                    total_part = tl.load(part_ml_ptr + at * 2 + 1)
                    acc_part = tl.load(part_acc_ptr + at * BLOCK_D + d)
                    peak, total, keep, take = _joined(peak, total, peak_part, total_part, base)
                    acc = acc * keep + acc_part * take
            result = acc * _final_factor(peak, total, sinks_ptr, head, base, SINKS)
            out = out_ptr + (start + query).to(tl.int64) * stride_out + head * HEAD_DIM + d
            tl.store(out, result.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


# --- the launch -------------------------------------------------------------------------------------------------------


def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of a ragged batch over the paged cache; the batch's own K and V are already in it.

    q ``[num_tokens, num_heads, head_dim]``, heads contiguous within a token; kv_layer ``[num_blocks, 2, num_kv_heads,
    block_size, head_dim]`` in q's type or e4m3, each block contiguous, any stride between blocks; query_start_loc
    ``[num_reqs + 1]``, seq_lens ``[num_reqs]``, block_table ``[num_reqs, max_blocks]`` int32; plan: of these lengths, on
    the same device. With a sliding window a token sees itself and the window - 1 tokens before it; soft_cap: scores become
    cap * tanh(score / cap); sinks ``[num_heads]``: one more score per head, with no value.

    Returns ``out``, shaped as q; tokens that query_start_loc does not cover are left as they were. Block table entries
    beyond a row's length, and those of blocks that its windows have passed, are never followed.
    Raises ValueError for shapes and types that the kernels do not do.
    """
    num_heads, head_dim = q.shape[1:]
    _, two, num_kv_heads, block_size, kv_dim = kv_layer.shape
    group = num_heads // num_kv_heads
    if two != 2 or kv_dim != head_dim or num_heads != group * num_kv_heads or head_dim % 8 or head_dim > 256:
        raise ValueError(f"queries {tuple(q.shape)} do not go with a cache {tuple(kv_layer.shape)}")
    if q.stride()[1:] != (head_dim, 1) or not kv_layer[0].is_contiguous() or block_table.stride(1) != 1:
        raise ValueError("heads of a token, positions of a block and entries of a table row must be contiguous")
    if kv_layer.dtype not in (q.dtype, torch.float8_e4m3fn):
        raise ValueError(f"a cache of {kv_layer.dtype} for queries of {q.dtype}")
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    section = plan.section(sliding_window)
    base, inner = (scale * _LOG2E, 0.0) if soft_cap is None else (soft_cap * _LOG2E, scale * _LOG2E / soft_cap)
    block_d = max(16, power_of_two(head_dim))
    some_sinks = q if sinks is None else sinks
    # Contraction is said explicitly: versions of Triton differ in what they take for granted.
    fused = plan.span == 0
    constants = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_SIZE": block_size,
        "SPAN": plan.span,
        "WINDOW": sliding_window is not None,
        "SOFT_CAP": soft_cap is not None,
        "SINKS": sinks is not None,
        "WIDE": _INTERPRETED and q.dtype == torch.bfloat16,
        "TWO_LEVEL": kv_layer.dtype == torch.float8_e4m3fn,
        "enable_fp_fusion": fused,
    }
    strides = q.stride(0), out.stride(0), kv_layer.stride(0), block_table.stride(0)
    window = sliding_window or 0
    if plan.num_prefill:
        config = plan.prefill
        _prefill_kernel[(plan.num_prefill, num_kv_heads)](
            q,
            kv_layer,
            out,
            some_sinks,
            plan.buffer,
            query_start_loc,
            seq_lens,
            block_table,
            plan.prefill_section,
            plan.num_prefill,
            window,
            inner,
            base,
            *strides,
            TILE_M=config.tile_m,
            TILE_N=config.tile_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **constants,
        )
    if plan.num_decode:
        config = plan.decode
        part_acc = torch.empty((plan.num_slots, plan.slot_rows, block_d), dtype=torch.float32, device=q.device)
        part_ml = torch.empty((plan.num_slots, plan.slot_rows, 2), dtype=torch.float32, device=q.device)
        _decode_kernel[(plan.num_programs,)](
            q,
            kv_layer,
            out,
            some_sinks,
            part_acc,
            part_ml,
            plan.buffer,
            query_start_loc,
            seq_lens,
            block_table,
            section,
            plan.num_decode,
            plan.slot_rows,
            window,
            inner,
            base,
            *strides,
            TILE_M=config.tile_m,
            TILE_N=config.tile_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **constants,
        )
        _merge_kernel[(plan.num_programs, plan.slot_rows)](
            out,
            some_sinks,
            part_acc,
            part_ml,
            plan.buffer,
            query_start_loc,
            section,
            plan.num_decode,
            base,
            out.stride(0),
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            SINKS=sinks is not None,
            num_warps=1,
            enable_fp_fusion=fused,
        )
    return out


# --- what can be launched, for the ahead-of-time check ----------------------------------------------------------------

_POINTERS = {"plan_ptr": "*i32", "starts_ptr": "*i32", "seq_lens_ptr": "*i32", "table_ptr": "*i32"}
_FLOATS = ("inner", "base")
_STRIDES = ("stride_q", "stride_out", "stride_block")  # always multiples of 16: so are heads


def variants() -> list[Variant]:
    """Every tuned configuration as most models launch it and with all options (window, soft cap, sinks) at once, which
    together take the most; other types where they change what is compiled."""
    found = []
    for kernel in ("prefill", "decode"):
        for head_dim in (64, 128, 256):
            found += _variants_of(kernel, head_dim)
            found += _variants_of(kernel, head_dim, options=True)
            found += _variants_of(kernel, head_dim, options=True, spans=True)
            found += _variants_of(kernel, head_dim, cache="fp8e4nv")
        found += _variants_of(kernel, 80)
        found += _variants_of(kernel, 96)
        found += _variants_of(kernel, 128, dtype="fp16")
        found += _variants_of(kernel, 128, cache="fp8e4nv", options=True, spans=True)
    return [*found, _merge_variant(96, sinks=False), _merge_variant(256, sinks=True)]


def _variants_of(
    kernel: str, head_dim: int, *, dtype: str = "bf16", cache: str = "same", options: bool = False, spans: bool = False
) -> list[Variant]:
    """One per different configuration; architectures that share one share the variant."""
    group = 4
    kv_dtype = {"same": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}[cache]
    by_config: dict[AttentionConfig, list[int]] = {}
    for arch in ARCHS:
        config = attention_config(arch, head_dim, group, kv_dtype, decode=kernel == "decode", spans=spans)
        by_config.setdefault(config, []).append(arch)
    decode = kernel == "decode"
    function = _decode_kernel if decode else _prefill_kernel
    result = []
    for config, archs in by_config.items():
        constants: dict[str, Any] = {
            "NUM_KV_HEADS": 8,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_D": power_of_two(head_dim),
            "BLOCK_SIZE": 16,
            "TILE_M": config.tile_m,
            "TILE_N": config.tile_n,
            "SPAN": SPAN if spans else 0,
            "WINDOW": options,
            "SOFT_CAP": options,
            "SINKS": options,
            "WIDE": False,
            "TWO_LEVEL": cache != "same",
        }
        pointers = dict.fromkeys(("q_ptr", "out_ptr"), f"*{dtype}") | {
            "kv_ptr": f"*{dtype if cache == 'same' else cache}",
            "sinks_ptr": "*fp32",
        }
        if decode:
            pointers |= {"part_acc_ptr": "*fp32", "part_ml_ptr": "*fp32"}
        integers: tuple[str, ...] = ("section", "slot_rows") if decode else ("tiles_at",)
        integers += ("num_tiles", "window", *_STRIDES, "stride_table")
        signature = pointers | _POINTERS | dict.fromkeys(integers, "i32") | dict.fromkeys(_FLOATS, "fp32")
        signature |= dict.fromkeys(constants, "constexpr")
        tiles = f"{config.tile_m}x{config.tile_n}x{config.num_warps}x{config.num_stages}"
        kind = f"{kernel}{'_spans' if spans else ''}{'_options' if options else ''}"
        result.append(
            Variant(
                name=f"{kind}_d{head_dim}_{dtype}{'' if cache == 'same' else '_fp8'}_{tiles}",
                kernel=function,
                signature=signature,
                constants=constants,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                divisible_by_16=_STRIDES,
                archs=tuple(archs),
                options={"enable_fp_fusion": not spans},
            )
        )
    return result


def _merge_variant(head_dim: int, *, sinks: bool) -> Variant:
    constants = {
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "BLOCK_D": power_of_two(head_dim),
        "SINKS": sinks,
    }
    pointers = {"out_ptr": "*bf16", "sinks_ptr": "*fp32", "part_acc_ptr": "*fp32", "part_ml_ptr": "*fp32"}
    signature = pointers | {"plan_ptr": "*i32", "starts_ptr": "*i32", "section": "i32", "num_tiles": "i32"}
    signature |= {"base": "fp32", "stride_out": "i32"} | dict.fromkeys(constants, "constexpr")
    return Variant(
        name=f"merge{'_sinks' if sinks else ''}_d{head_dim}",
        kernel=_merge_kernel,
        signature=signature,
        constants=constants,
        num_warps=1,
        num_stages=2,
        divisible_by_16=("stride_out",),
        options={"enable_fp_fusion": True},
    )
