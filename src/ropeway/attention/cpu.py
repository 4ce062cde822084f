"""Paged attention by the native CPU kernels.

Owns: which kernel call does what part of the seam. Must not know: the kernels' inner layout of a KV tile, models.
Called by: worker.runner (kv_shape, prepare), model.decoder (forward_fused).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ropeway.attention.base import AttentionMetadata, AttentionSpec, Rotation
from ropeway_kernels.cpu import NativeKernels


class CpuAttention:
    """The ``cpu`` backend. Sums in float32 whatever the cache holds; a token's result depends on its request alone."""

    name = "cpu"

    def __init__(self, native: NativeKernels, block_size: int) -> None:
        self._native = native
        self.block_size = block_size

    @staticmethod
    def supports(native: NativeKernels, block_size: int, head_dim: int) -> bool:
        """Whether the kernels do these sizes; where not, TorchAttention does."""
        return block_size % 8 == 0 and head_dim % 8 == 0

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """``(num_blocks, 2, num_kv_heads, block_size, head_dim)``; the order of the elements of a block and head is the
        kernels' own. A layer may be a view with any stride between blocks; the cache must start as zeros."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def prepare(self, meta: AttentionMetadata) -> AttentionMetadata:
        meta.block_table = meta.block_table.contiguous()
        return meta

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_layer: Tensor, meta: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        heads = torch.cat([k, v], dim=1).contiguous()
        self._native.rope_kv(heads, kv_layer, meta.slot_mapping, num_heads=0)
        return self._attend(q.contiguous(), kv_layer, meta, spec)

    def forward_fused(
        self, heads: Tensor, rotation: Rotation, kv_layer: Tensor, meta: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        num_heads = heads.shape[1] - 2 * kv_layer.shape[2]
        self._native.rope_kv(
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
        return self._native.attention(
            q,
            kv_layer,
            meta.query_start_loc,
            meta.seq_lens,
            meta.block_table,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
        )


__all__ = ["CpuAttention"]
