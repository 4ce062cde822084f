"""An attention backend whose decode steps can be captured, in plain torch: what TritonAttention is to a GPU, for tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ropeway.attention.base import AttentionMetadata, AttentionSpec
from ropeway.worker.device import Device


@dataclass
class Plan:
    rows: Tensor  # [num_tokens] int64; whose token it is
    visible: Tensor  # [num_tokens] int64; positions that it sees, 0 for padding

    def copy_into(self, target: Plan) -> None:
        target.rows.copy_(self.rows)
        target.visible.copy_(self.visible)


class StaticAttention:
    """Every token reads all the blocks that its row may have and hides what it does not see, so shapes depend on the
    number of tokens and the width of the block table alone."""

    name = "static"
    captures_decode = True

    def __init__(self, device: Device, block_size: int) -> None:
        self.device = device
        self.block_size = block_size

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def prepare(self, meta: AttentionMetadata) -> AttentionMetadata:
        query_lens, seq_lens = meta.host_query_lens, meta.host_seq_lens
        assert query_lens is not None
        assert seq_lens is not None
        rows = np.repeat(np.arange(meta.num_reqs), query_lens)
        ends = np.cumsum(query_lens)
        visible = np.arange(meta.num_tokens) - ends[rows] + 1 + seq_lens[rows]
        arrays = {"rows": rows, "visible": np.maximum(visible, 0).astype(np.int64)}
        return replace(meta, plan=Plan(**self.device.upload(arrays)))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_layer: Tensor, meta: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        assert spec.sliding_window is None
        assert spec.soft_cap is None
        plan: Plan = meta.plan
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = kv_layer.shape[2]
        slots = meta.slot_mapping.clamp(min=0)  # padding goes to the null block, which nobody reads
        kv_layer[slots // self.block_size, :, :, slots % self.block_size] = torch.stack([k, v], 1).to(kv_layer.dtype)
        table = meta.block_table.index_select(0, plan.rows).long()  # [num_tokens, max_blocks]
        kv = kv_layer[table].permute(2, 0, 3, 1, 4, 5).reshape(2, num_tokens, num_kv_heads, -1, head_dim).float()
        queries = q.float().view(num_tokens, num_kv_heads, -1, head_dim)
        scores = torch.matmul(queries, kv[0].transpose(2, 3)) * spec.scale  # [num_tokens, kv heads, group, positions]
        hidden = torch.arange(scores.shape[-1], device=q.device) >= plan.visible[:, None]
        weights = scores.masked_fill(hidden[:, None, None], -1e30).softmax(-1)
        return torch.matmul(weights, kv[1]).view(num_tokens, num_heads, head_dim).to(q.dtype)
