"""The attention seam: what the model runner and the decoder may ask of a backend.

Owns: AttentionMetadata and the backend protocols. Must not know: requests, sampling, models.
Called by: worker.runner (kv_shape, prepare), model.decoder (forward or forward_fused).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """One step's ragged batch. Rows are requests, in plan order; tokens of a row are contiguous.

    Token t of row i (``query_start_loc[i] <= t < query_start_loc[i + 1]``) sits at absolute position
    ``seq_lens[i] - query_len[i] + (t - query_start_loc[i])`` and attends to positions up to and including its own.
    """

    query_start_loc: Tensor  # [num_reqs + 1] int32
    seq_lens: Tensor  # [num_reqs] int32; KV length after this step
    block_table: Tensor  # [num_reqs, max_blocks] int32; columns beyond a row's blocks hold 0, the null block
    slot_mapping: Tensor  # [num_tokens] int64; block id * block_size + offset for each token's KV
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    plan: Any = None  # whatever the backend worked out once for all layers; see StaticPlan
    host_query_lens: np.ndarray | None = None  # [num_reqs] int32; query lengths, for planning without asking the device
    host_seq_lens: np.ndarray | None = None  # [num_reqs] int32; the same as seq_lens


class StaticPlan(Protocol):
    """What ``AttentionMetadata.plan`` must be for a step to be captured as a CUDA graph: tensors whose shapes depend on
    the padded number of rows alone."""

    def copy_into(self, target: Any) -> None:
        """Overwrite the tensors of ``target``, a plan for as many rows that a captured step reads, in stream order."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What is particular to one layer's attention; constant over the model's life."""

    scale: float
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    soft_cap: float | None = None  # logits become cap * tanh(logits / cap)


@dataclass(frozen=True, slots=True)
class Rotation:
    """What happens to a layer's q and k before attention: a norm per head, where there is one, then the rotation."""

    cos: Tensor  # [num_tokens, 1, rotary_dim / 2] float32
    sin: Tensor  # same shape
    q_norm: Tensor | None = None  # [head_dim] float32
    k_norm: Tensor | None = None  # same shape
    eps: float = 0.0


class AttentionBackend(Protocol):
    name: str

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's cache; its first dimension is num_blocks."""
        ...

    def prepare(self, meta: AttentionMetadata) -> AttentionMetadata:
        """Once per step: fill ``meta.plan``.

        A backend whose attribute ``captures_decode`` is true plans as StaticPlan asks when every row has one query, and
        takes padding rows there: seq_lens 0 and slot -1, for which it writes nothing and returns finite numbers."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_layer: Tensor, meta: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Once per layer: write k and v to their slots, then attend.

        q ``[num_tokens, num_heads, head_dim]``, k and v ``[num_tokens, num_kv_heads, head_dim]``; returns
        ``[num_tokens, num_heads, head_dim]``.
        """
        ...


class FusedAttentionBackend(AttentionBackend, Protocol):
    """A backend that can also take the heads as the projection left them."""

    def forward_fused(
        self, heads: Tensor, rotation: Rotation, kv_layer: Tensor, meta: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Once per layer, instead of `forward`: norm and rotate, write, attend.

        heads ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`` (q, k, v), contiguous, used up; returns
        ``[num_tokens, num_heads, head_dim]``.
        """
        ...


__all__ = ["AttentionBackend", "AttentionMetadata", "AttentionSpec", "FusedAttentionBackend", "Rotation"]
