"""Paged attention by the FlashAttention library (flash-attn 2.7 or later).

Owns: how our block tables and cache layout look to that library, and what it cannot do. Must not know: requests, models.
Called by: worker.runner (kv_shape, prepare), model.decoder (forward).

The library wants a cache ``[num_blocks, block_size, num_kv_heads, head_dim]`` and reads it by its strides, so it is given
a transposed view of ours. Its blocks must hold a multiple of 256 tokens.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropeway.attention.base import AttentionMetadata, AttentionSpec
from ropeway.errors import ConfigError

BLOCK_MULTIPLE = 256  # tokens per block


class FlashAttention:
    """The ``flash-attn`` backend."""

    name = "flash-attn"

    def __init__(self, block_size: int, dtype: torch.dtype) -> None:
        """dtype: of the model and the cache. Raises ConfigError if the library is not there or does not do these."""
        if block_size % BLOCK_MULTIPLE:
            raise ConfigError(
                f"--attention-backend flash-attn: --block-size must be a multiple of {BLOCK_MULTIPLE} for it, not "
                f"{block_size}"
            )
        if dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError(f"--attention-backend flash-attn: needs --dtype float16 or bfloat16, not {dtype}")
        self._library = import_library("flash_attn", "flash-attn")

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """``(num_blocks, 2, num_kv_heads, block_size, head_dim)``, with any stride between blocks."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def prepare(self, meta: AttentionMetadata) -> AttentionMetadata:
        """The plan is where each row's keys would begin if they were laid end to end, ``[num_reqs + 1]`` int32."""
        meta.plan = F.pad(meta.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return meta

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_layer: Tensor, meta: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        write_kv(k, v, kv_layer, meta.slot_mapping)
        keys, values = kv_layer[:, 0].transpose(1, 2), kv_layer[:, 1].transpose(1, 2)
        options: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "causal": True,
            # How many positions before its own a token sees; -1 is all.
            "window_size": (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0),
            "softcap": spec.soft_cap or 0.0,
            "block_table": meta.block_table,
        }
        if meta.max_query_len == 1 and meta.num_tokens == meta.num_reqs:  # splits long rows over the chip
            out: Tensor = self._library.flash_attn_with_kvcache(
                q[:, None], keys, values, cache_seqlens=meta.seq_lens, **options
            )
            return out[:, 0]
        out = self._library.flash_attn_varlen_func(
            q.contiguous(),
            keys,
            values,
            cu_seqlens_q=meta.query_start_loc,
            cu_seqlens_k=meta.plan,
            max_seqlen_q=meta.max_query_len,
            max_seqlen_k=meta.max_seq_len,
            **options,
        )
        return out


def import_library(module: str, backend: str) -> Any:
    """Raises ConfigError, naming the flag, if it is not there or cannot be loaded."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: built for another CUDA
        raise ConfigError(
            f"--attention-backend {backend}: the package {module} cannot be loaded ({error}); install it, or give triton "
            "or auto"
        ) from error


def write_kv(k: Tensor, v: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Put each token's K and V ``[num_tokens, num_kv_heads, head_dim]`` into its slot ``[num_tokens]``, in torch."""
    block_size = kv_layer.shape[3]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv_layer[blocks, :, :, offsets] = torch.stack((k, v), dim=1).to(kv_layer.dtype)


__all__ = ["BLOCK_MULTIPLE", "FlashAttention", "import_library", "write_kv"]
