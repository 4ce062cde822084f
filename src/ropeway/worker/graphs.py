"""CUDA graphs of decode steps: one launch instead of hundreds.

Owns: which padded batch sizes there are, when one is captured, and the static buffers that captured steps read. Must not
know: CUDA (it is given a device that captures), requests, sampling. Called by: worker.runner, for steps in which every
row has one token.

A captured step reads and writes the addresses that it saw. So everything that changes from step to step lies in buffers
that live as long as this object: a step is copied into them, in the order of the compute queue, and then replayed. What
it reads besides, weights and KV cache, never moves. Its logits belong to the capture and hold until the next replay.

A size is used eagerly first, which compiles and chooses whatever is set up at first use; the second use captures. So
nothing is captured before the first tokens are out, nor ever for a size that comes once. Eager steps are padded like
replayed ones, and so compute the same bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ropeway.attention.base import AttentionMetadata
from ropeway.worker.batch import InputBatch
from ropeway.worker.device import Device, Replay

LARGEST = 512  # rows; beyond, a step's kernels are long enough to hide their launches

Forward = Callable[[Tensor, Tensor, AttentionMetadata, Tensor], Tensor]
"""(input_ids, positions, meta, logits_indices) -> logits ``[num_rows, vocab]``, of the whole model."""


@dataclass(slots=True)
class _Size:
    """One padded batch size."""

    replay: Replay | None = None
    meta: AttentionMetadata | None = None  # with the plan that the captured step reads
    num_uses: int = 0


@dataclass(slots=True)
class DecodeGraphs:
    forward: Forward
    device: Device
    max_num_seqs: int
    max_blocks: int  # of one sequence
    max_model_len: int
    capture: bool = True  # without, steps are padded and nothing else
    sizes: list[int] = field(init=False)
    _states: dict[int, _Size] = field(init=False)
    # Static buffers of the largest size, whose beginnings serve the smaller ones.
    _input_ids: Tensor = field(init=False)  # [largest] int64
    _positions: Tensor = field(init=False)  # [largest] int64
    _slot_mapping: Tensor = field(init=False)  # [largest] int64
    _seq_lens: Tensor = field(init=False)  # [largest] int32
    _block_table: Tensor = field(init=False)  # [largest, max_blocks] int32; stale beyond a row's own blocks
    _rows: Tensor = field(init=False)  # [largest] int64; 0, 1, 2, ...: every row's logits are wanted
    _query_start_loc: Tensor = field(init=False)  # [largest + 1] int32; the same, for rows of one query each

    def __post_init__(self) -> None:
        self.sizes = padded_sizes(self.max_num_seqs)
        self._states = {size: _Size() for size in self.sizes}
        largest, place = self.sizes[-1], self.device.torch_device
        self._input_ids, self._positions = (torch.zeros(largest, dtype=torch.int64, device=place) for _ in range(2))
        self._slot_mapping = torch.full((largest,), -1, dtype=torch.int64, device=place)
        self._seq_lens = torch.zeros(largest, dtype=torch.int32, device=place)
        self._block_table = torch.zeros(largest, self.max_blocks, dtype=torch.int32, device=place)
        self._rows = torch.arange(largest, dtype=torch.int64, device=place)
        self._query_start_loc = torch.arange(largest + 1, dtype=torch.int32, device=place)

    def padded_size(self, num_rows: int) -> int:
        """Rows that a decode step of ``num_rows`` is padded to; 0 if it is too large to be captured."""
        index = bisect_left(self.sizes, num_rows)
        return self.sizes[index] if index < len(self.sizes) else 0

    def run(self, batch: InputBatch) -> Tensor:
        """Logits ``[padded rows, vocab]`` of a decode step padded to one of the sizes; its plan is made."""
        size = batch.meta.num_reqs
        state = self._states[size]
        state.num_uses += 1
        if state.num_uses == 1 or not self.capture:
            return self.forward(batch.input_ids, batch.positions, batch.meta, self._rows[:size])
        if state.meta is None:
            state.meta = self._static_meta(batch.meta, size)
        else:
            batch.meta.plan.copy_into(state.meta.plan)
        torch._foreach_copy_(
            [self._input_ids[:size], self._positions[:size], self._slot_mapping[:size]],
            [batch.input_ids, batch.positions, batch.meta.slot_mapping],
        )
        self._seq_lens[:size].copy_(batch.meta.seq_lens)
        self._block_table[:size, : batch.meta.block_table.shape[1]].copy_(batch.meta.block_table)
        if state.replay is None:
            state.replay = self._capture(size, state.meta)
        return state.replay()

    def _static_meta(self, meta: AttentionMetadata, size: int) -> AttentionMetadata:
        """Like ``meta``, but of static buffers, with a plan of its own and room for the longest sequence."""
        return replace(
            meta,
            query_start_loc=self._query_start_loc[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_table=self._block_table[:size],
            slot_mapping=self._slot_mapping[:size],
            max_seq_len=self.max_model_len,
            plan=_with_own_tensors(meta.plan),
            host_query_lens=None,
            host_seq_lens=None,
        )

    def _capture(self, size: int, meta: AttentionMetadata) -> Replay:
        input_ids, positions, rows = self._input_ids[:size], self._positions[:size], self._rows[:size]
        return self.device.capture(lambda: self.forward(input_ids, positions, meta, rows))


def _with_own_tensors(plan: Any) -> Any:
    """A copy of a plan whose tensors nobody else writes to, made in the order of the compute queue."""
    if isinstance(plan, Tensor):
        return plan.clone()
    if isinstance(plan, dict):
        return {key: _with_own_tensors(value) for key, value in plan.items()}
    if isinstance(plan, list | tuple):
        return type(plan)(_with_own_tensors(value) for value in plan)
    if is_dataclass(plan) and not isinstance(plan, type):
        return replace(plan, **{field.name: _with_own_tensors(getattr(plan, field.name)) for field in fields(plan)})
    return plan


def padded_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every multiple of 8 up to ``max_num_seqs``, which is one itself; none above `LARGEST`."""
    largest = min(max_num_seqs, LARGEST)
    sizes = {1, 2, 4, *range(8, largest + 1, 8), largest}
    return sorted(size for size in sizes if size <= largest)


__all__ = ["LARGEST", "DecodeGraphs", "Forward", "padded_sizes"]
