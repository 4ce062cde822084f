"""Paged attention by the FlashInfer library (0.2 or later).

Owns: how our block tables and cache layout look to that library. Must not know: requests, models.
Called by: worker.runner (kv_shape, prepare), model.decoder (forward).

Its layout HND, ``[num_pages, 2, num_kv_heads, page_size, head_dim]`` with any stride between pages, is ours. Pages of all
rows are one flat list; a plan is made on the host, once per step for each kind of layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropeway.attention.base import AttentionMetadata, AttentionSpec
from ropeway.attention.flash_attn import import_library, write_kv
from ropeway.errors import ConfigError

_WORKSPACE = 128 * 2**20  # bytes, for partial results; what the library's documentation recommends


@dataclass(slots=True)
class _Plan:
    """Host tensors and the flat list of pages of one step; its kinds of layers are planned when the first is seen."""

    page_starts: Tensor  # [num_reqs + 1] int32 on the host; where a row's pages begin in the list
    last_lens: Tensor  # [num_reqs] int32 on the host; tokens in a row's last page
    query_starts: Tensor  # [num_reqs + 1] int32 on the host
    pages: Tensor  # [all pages] int32 on the device
    planned: dict[AttentionSpec, Any] = field(default_factory=dict)


class FlashInferAttention:
    """The ``flashinfer`` backend."""

    name = "flashinfer"

    def __init__(
        self,
        block_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: of the model and the cache. Raises ConfigError if the library is not there or does not do these."""
        if dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError(f"--attention-backend flashinfer: needs --dtype float16 or bfloat16, not {dtype}")
        self.block_size = block_size
        self._library = import_library("flashinfer", "flashinfer")
        self._sizes = (num_heads, num_kv_heads, head_dim, block_size)
        self._dtype = dtype
        self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
        # By kind of layer, then decode or not: each keeps the plan of a step, and all may share one workspace, because
        # layers run one after another.
        self._wrappers: dict[tuple[AttentionSpec, bool], Any] = {}

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """``(num_blocks, 2, num_kv_heads, block_size, head_dim)``, with any stride between blocks."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def prepare(self, meta: AttentionMetadata) -> AttentionMetadata:
        assert meta.host_seq_lens is not None
        assert meta.host_query_lens is not None
        counts = -(-meta.host_seq_lens // self.block_size)  # pages of each row
        starts = np.zeros(meta.num_reqs + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        queries = np.zeros(meta.num_reqs + 1, dtype=np.int32)
        np.cumsum(meta.host_query_lens, out=queries[1:])
        rows = np.repeat(np.arange(meta.num_reqs), counts)
        # Where each page stands in the block table, seen as one list.
        places = rows * meta.block_table.shape[1] + np.arange(len(rows)) - starts[rows]
        index = torch.from_numpy(places)
        if meta.block_table.is_cuda:
            index = index.pin_memory()  # torch keeps the pinned memory until the copy has been done
        index = index.to(meta.block_table.device, non_blocking=True)
        meta.plan = _Plan(
            page_starts=torch.from_numpy(starts),
            last_lens=torch.from_numpy((meta.host_seq_lens - (counts - 1) * self.block_size).astype(np.int32)),
            query_starts=torch.from_numpy(queries),
            pages=meta.block_table.reshape(-1).index_select(0, index),
        )
        return meta

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_layer: Tensor, meta: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        write_kv(k, v, kv_layer, meta.slot_mapping)
        plan: _Plan = meta.plan
        wrapper = plan.planned.get(spec)
        if wrapper is None:
            wrapper = plan.planned[spec] = self._planned(plan, spec, decode=meta.max_query_len == 1)
        out: Tensor = wrapper.run(q.contiguous(), kv_layer)
        return out

    def _planned(self, plan: _Plan, spec: AttentionSpec, *, decode: bool) -> Any:
        wrapper = self._wrappers.get((spec, decode))
        if wrapper is None:
            if decode:
                wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, "HND", use_tensor_cores=True
                )
            else:
                wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            self._wrappers[spec, decode] = wrapper
        pages = (plan.page_starts, plan.pages, plan.last_lens)
        options: dict[str, Any] = {
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "logits_soft_cap": spec.soft_cap or 0.0,
            "sm_scale": spec.scale,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }
        if decode:
            wrapper.plan(*pages, *self._sizes, **options)
        else:
            wrapper.plan(plan.query_starts, *pages, *self._sizes, causal=True, **options)
        return wrapper


__all__ = ["FlashInferAttention"]
