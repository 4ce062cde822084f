"""The plan of one step's paged attention: how the work is cut, decided on the host.

Owns: AttentionPlan, the int32 array that the kernels read, and how equal shares are made. Must not know: Triton, layers,
how a share is computed. Called by: ropeway.attention.triton (once per step plan_step); read by paged_attention, whose
docstring says what tiles, units, shares and fixed spans are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropeway_kernels.tuning import SPAN, AttentionConfig, attention_config, current_arch, power_of_two

_PROGRAM_FIELDS = 6  # first tile, its KV head, its unit; units; slots of what the share's two edges have cut
_MERGE_FIELDS = 4  # tile, KV head, first slot, number of slots


@dataclass(slots=True)
class AttentionPlan:
    """How one step's attention is cut; one for all layers, with a section per distinct sliding window.

    ``buffer`` int32: row of each decode tile ``[num_decode]``; then per window the units before each decode tile
    ``[num_decode + 1]``, ``[num_programs, 6]`` and ``[num_programs, 4]`` as _PROGRAM_FIELDS and _MERGE_FIELDS say; then
    row and first query of each prefill tile ``[2, num_prefill]``, the longest first.
    """

    num_decode: int  # rows that the decode kernel takes, those without queries or positions included
    num_prefill: int  # query tiles
    num_programs: int
    num_slots: int  # room for partial results; an upper bound that does not depend on the lengths
    slot_rows: int  # product rows of a partial result: the group's heads of the most queries that a decode row has
    windows: tuple[int | None, ...]
    decode: AttentionConfig
    prefill: AttentionConfig
    span: int  # positions; 0: no fixed spans
    buffer: Tensor

    def section(self, window: int | None) -> int:
        """Where in ``buffer`` the decode arrays of a window begin. Raises ValueError for one that was not planned."""
        if window not in self.windows:
            raise ValueError(f"sliding window {window} was not planned; the plan has {self.windows}")
        return self.num_decode + self.windows.index(window) * self._section_size

    @property
    def prefill_section(self) -> int:
        return self.num_decode + len(self.windows) * self._section_size

    @property
    def _section_size(self) -> int:
        return self.num_decode + 1 + (_PROGRAM_FIELDS + _MERGE_FIELDS) * self.num_programs

    def to(self, device: torch.device) -> AttentionPlan:
        """With its buffer on ``device``; does not wait for the device. Itself if it is there already."""
        if self.buffer.device == device:
            return self
        buffer = self.buffer
        if device.type == "cuda" and buffer.device.type == "cpu":
            buffer = buffer.pin_memory()  # torch keeps the pinned memory until the copy has been done
        return AttentionPlan(
            self.num_decode,
            self.num_prefill,
            self.num_programs,
            self.num_slots,
            self.slot_rows,
            self.windows,
            self.decode,
            self.prefill,
            self.span,
            buffer.to(device, non_blocking=True),
        )

    def copy_into(self, target: AttentionPlan) -> None:
        """Overwrite the buffer of ``target`` in stream order. Raises ValueError unless it is a plan for as many decode
        rows and none to prefill, by the same programs and tile sizes."""

        def shape(plan: AttentionPlan) -> tuple[Any, ...]:
            sizes = plan.num_decode, plan.num_prefill, plan.num_programs, plan.num_slots, plan.slot_rows
            return (*sizes, plan.windows, plan.decode, plan.span)

        if shape(self) != shape(target) or self.num_prefill:
            raise ValueError(f"plan of {shape(self)} cannot stand in for one of {shape(target)}")
        target.buffer.copy_(self.buffer, non_blocking=True)


def plan_step(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_windows: tuple[int | None, ...] = (None,),
    num_programs: int,
    dtype: torch.dtype = torch.bfloat16,
    arch: int | None = None,
    fixed_spans: bool = False,
    max_seq_len: int | None = None,
    configs: tuple[AttentionConfig, AttentionConfig] | None = None,
    span: int = SPAN,
) -> AttentionPlan:
    """Cut one step's work; on the host, without a loop over rows.

    query_lens, seq_lens ``[num_reqs]``: new tokens, and KV length after this step, of each row; a row of seq_len 0 is
    padding. sliding_windows: every distinct window of the model's layers. num_programs: of the decode kernel; what keeps
    the device busy. dtype: the KV cache's, with arch (the current device's, if None) the key of the tuning table.
    max_seq_len: with fixed spans, the longest seq_len of any plan that shall stand in for this one (AttentionPlan.copy_into).
    configs: decode and prefill tile sizes instead of the table's. span: positions, a multiple of tile_n.
    Raises ValueError where heads do not divide or sizes are not those that the kernels do.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads cannot share {num_kv_heads} KV heads")
    group = num_heads // num_kv_heads
    if configs is None:
        arch = current_arch() if arch is None else arch
        decode, prefill = (
            attention_config(arch, head_dim, group, dtype, decode=kind, spans=fixed_spans) for kind in (True, False)
        )
    else:
        decode, prefill = configs
    most_rows = max(16, power_of_two(group))
    if most_rows > min(decode.tile_m, prefill.tile_m):
        raise ValueError(f"tiles of {decode.tile_m} and {prefill.tile_m} rows cannot hold {group} heads")
    if fixed_spans and (decode != prefill or span % decode.tile_n):
        raise ValueError("fixed spans need one configuration for both kernels, and whole tiles in a span")
    query_lens, seq_lens = query_lens.astype(np.int64), seq_lens.astype(np.int64)

    num_rows = len(query_lens)
    few = query_lens <= most_rows // group
    num_decode = int(np.count_nonzero(few))
    num_windows, share_size = len(sliding_windows), (_PROGRAM_FIELDS + _MERGE_FIELDS) * num_programs
    decode_size = num_decode + num_windows * (num_decode + 1 + share_size)
    slot_rows = group
    tiles = None
    if num_decode < num_rows:
        tiles = _query_tiles(query_lens, seq_lens, np.flatnonzero(~few), prefill.tile_m // group)
    num_prefill = 0 if tiles is None else tiles.shape[1]
    buffer = np.zeros(decode_size + 2 * num_prefill, np.int32)
    if tiles is not None:
        buffer[decode_size:] = tiles.ravel()
    if num_decode:
        if num_decode < num_rows:
            rows = np.flatnonzero(few)
            queries, ends = query_lens[rows], seq_lens[rows]
        else:
            rows, queries, ends = np.arange(num_rows), query_lens, seq_lens
        buffer[:num_decode] = rows
        slot_rows *= max(1, int(queries.max()))
        ends = ends * (queries > 0)
        unit = span if fixed_spans else decode.tile_n
        for index, window in enumerate(sliding_windows):
            units = (ends + (unit - 1)) // unit
            if window is not None:
                units -= np.maximum(ends - queries - (window - 1), 0) // unit
            at = num_decode + index * (num_decode + 1 + share_size)
            before = buffer[at : at + num_decode + 1]
            _share(units, before, buffer[at + num_decode + 1 :][:share_size], num_kv_heads, slot_per_unit=fixed_spans)

    num_slots = 2 * num_programs  # each edge of a share cuts one item
    if fixed_spans:
        longest = int(seq_lens.max(initial=0)) if max_seq_len is None else max_seq_len
        num_slots = max(1, min(num_programs - 1, num_decode * num_kv_heads) * -(-longest // span))
    return AttentionPlan(
        num_decode=num_decode,
        num_prefill=num_prefill,
        num_programs=num_programs,
        num_slots=num_slots,
        slot_rows=slot_rows,
        windows=sliding_windows,
        decode=decode,
        prefill=prefill,
        span=span if fixed_spans else 0,
        buffer=torch.from_numpy(buffer),
    )


def _query_tiles(query_lens: np.ndarray, seq_lens: np.ndarray, rows: np.ndarray, width: int) -> np.ndarray:
    """Row and first query ``[2, num_tiles]`` of every ``width`` queries of these rows. The longest first: a program that
    starts last should have little to do."""
    counts = -(-query_lens[rows] // width)
    tile_rows = np.repeat(rows, counts)
    first = (np.arange(len(tile_rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * width
    order = np.argsort((query_lens - seq_lens)[tile_rows] - first, kind="stable")
    return np.stack([tile_rows[order], first[order]])


def _share(
    units: np.ndarray, before: np.ndarray, shares: np.ndarray, num_kv_heads: int, *, slot_per_unit: bool
) -> None:
    """Lay (tile, KV head, unit) out flat, in that order, and cut it into equal shares.

    units ``[num_tiles]``: of one KV head. slot_per_unit: each unit of an item that is cut has a slot, rather than each
    share's part of it. Written are before ``[num_tiles + 1]`` and shares ``[num_programs * 10]``, which holds zeros.
    """
    np.cumsum(units, out=before[1:])
    total = int(before[-1]) * num_kv_heads
    num_programs = len(shares) // (_PROGRAM_FIELDS + _MERGE_FIELDS)
    busy = min(num_programs, total)  # with less work than programs, the last ones have none
    if not busy:
        return
    programs = shares[: _PROGRAM_FIELDS * num_programs].reshape(num_programs, _PROGRAM_FIELDS)
    starts = np.arange(busy) * total // busy
    # An item is one tile and KV head. Tiles without units begin where the next one does; the last of these has some.
    edges = before.astype(np.int64) * num_kv_heads
    tile = edges[1:].searchsorted(starts, side="right")
    length = units[tile]
    within = starts - edges[tile]
    head = within // length
    unit = within - head * length
    programs[:busy, 0], programs[:busy, 1], programs[:busy, 2] = tile, head, unit
    programs[: busy - 1, 3] = starts[1:] - starts[:-1]
    programs[busy - 1, 3] = total - starts[-1]

    (cut,) = unit.nonzero()  # programs that begin inside an item
    if not len(cut):
        return
    item = tile * num_kv_heads + head
    # Of the programs that begin inside the same item, the first is the one behind the program that began the item.
    is_first = (item[cut] != item[cut - 1]) | (unit[cut - 1] == 0)
    (first,) = is_first.nonzero()
    owners = cut[first]
    if slot_per_unit:
        counts = length[owners]
        slots = counts.cumsum() - counts
        programs[cut, 4] = slots[is_first.cumsum() - 1]
    else:
        slots = first + np.arange(len(first))
        counts = np.full(len(first), len(cut) + 1)
        counts[:-1] = first[1:] + 1
        counts -= first
        programs[cut, 4] = np.arange(len(cut)) + is_first.cumsum()
    programs[owners - 1, 5] = slots  # the item's first part is the end of the share before
    merges = shares[_PROGRAM_FIELDS * num_programs :].reshape(num_programs, _MERGE_FIELDS)[: len(first)]
    merges[:, 0], merges[:, 1], merges[:, 2], merges[:, 3] = tile[owners], head[owners], slots, counts
