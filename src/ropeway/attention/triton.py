"""Paged attention by the Triton kernels.

Owns: which kernel call does what part of the seam, and when a step is planned. Must not know: how a step's work is cut,
models, requests. Called by: worker.runner (kv_shape, prepare), worker.graphs (plans that a captured step reads),
model.decoder (forward_fused). Imported only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ropeway.attention.base import AttentionMetadata, AttentionSpec, Rotation
from ropeway_kernels.attention_plan import AttentionPlan, plan_step
from ropeway_kernels.kv_write import rope_kv_write
from ropeway_kernels.paged_attention import paged_attention
from ropeway_kernels.tuning import multiprocessors

_PROGRAMS_PER_MULTIPROCESSOR = 2  # of the decode kernel; as many as its shared memory lets run side by side


class TritonAttention:
    """The ``triton`` backend. Sums in float32 whatever the cache holds; with ``fixed_spans`` a token's result depends on
    its request alone, at a price that benchmarks/gpu/check.py measures."""

    name = "triton"
    captures_decode = True  # plans of decode steps are static: see AttentionPlan.copy_into

    def __init__(
        self,
        block_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        sliding_windows: Iterable[int | None],
        kv_dtype: torch.dtype,
        fixed_spans: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        """num_heads, num_kv_heads: of this rank; sliding_windows: of every layer, None where there is none; kv_dtype: what
        the cache holds; max_model_len: no seq_len is larger, needed with fixed_spans where steps are captured."""
        self.block_size = block_size
        self.fixed_spans = fixed_spans
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._windows = tuple(dict.fromkeys(sliding_windows))
        self._kv_dtype = kv_dtype
        self._max_model_len = max_model_len
        self._num_programs = multiprocessors() * _PROGRAMS_PER_MULTIPROCESSOR

    @staticmethod
    def supports(block_size: int, head_dim: int) -> bool:
        """Whether the kernels do these sizes."""
        return block_size & (block_size - 1) == 0 and head_dim % 8 == 0 and head_dim <= 256

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """``(num_blocks, 2, num_kv_heads, block_size, head_dim)``. A layer may be a view with any stride between blocks;
        what was never written is never read."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def prepare(self, meta: AttentionMetadata) -> AttentionMetadata:
        query_lens, seq_lens = meta.host_query_lens, meta.host_seq_lens
        if query_lens is None or seq_lens is None:  # waits for the device
            query_lens = np.diff(meta.query_start_loc.cpu().numpy())
            seq_lens = meta.seq_lens.cpu().numpy()
        plan = plan_step(
            query_lens,
            seq_lens,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
            sliding_windows=self._windows,
            num_programs=self._num_programs,
            dtype=self._kv_dtype,
            fixed_spans=self.fixed_spans,
            max_seq_len=self._max_model_len,
        )
        meta.plan = plan.to(meta.seq_lens.device)
        return meta

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_layer: Tensor, meta: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        rope_kv_write(torch.cat([k, v], dim=1), kv_layer, meta.slot_mapping, num_heads=0)
        return self._attend(q.contiguous(), kv_layer, meta, spec)

    def forward_fused(
        self, heads: Tensor, rotation: Rotation, kv_layer: Tensor, meta: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        num_heads = heads.shape[1] - 2 * kv_layer.shape[2]
        rope_kv_write(
            heads,
            kv_layer,
            meta.slot_mapping,
            num_heads=num_heads,
            cos=rotation.cos,
            sin=rotation.sin,
            q_norm=rotation.q_norm,
            k_norm=rotation.k_norm,
            eps=rotation.eps,
        )
        return self._attend(heads[:, :num_heads], kv_layer, meta, spec)

    def _attend(self, q: Tensor, kv_layer: Tensor, meta: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        plan: AttentionPlan = meta.plan
        return paged_attention(
            q,
            kv_layer,
            meta.query_start_loc,
            meta.seq_lens,
            meta.block_table,
            plan,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
        )


__all__ = ["TritonAttention"]
