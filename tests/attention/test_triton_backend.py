"""The Triton backend, interpreted, step by step against the torch backend, which has a cache of its own."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports a Triton kernel

pytest.importorskip("triton")

from ropeway.attention.base import AttentionMetadata, AttentionSpec, Rotation
from ropeway.attention.torch_ref import TorchAttention
from ropeway.attention.triton import TritonAttention
from ropeway.model.rotary import rotate

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 32
SPECS = [AttentionSpec(0.2), AttentionSpec(0.2, sliding_window=20), AttentionSpec(0.2, soft_cap=3.0)]  # one per layer
# New tokens of each row in each step: prompts, a mixed step with a row that waits, and decoding.
STEPS = [[40, 0, 17], [30, 25, 1], [1, 1, 1], [1, 1, 1], [2, 1, 1]]
nan = float("nan")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def backend(**options: bool) -> TritonAttention:
    return TritonAttention(
        BLOCK_SIZE,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        sliding_windows=[spec.sliding_window for spec in SPECS],
        kv_dtype=torch.float32,
        max_model_len=128,
        **options,
    )


def metadata(context: list[int], new: list[int], block_table: Tensor) -> AttentionMetadata:
    """Of the rows that have tokens."""
    rows = [row for row, count in enumerate(new) if count]
    query_lens = np.array([new[row] for row in rows], dtype=np.int32)
    seq_lens = np.array([context[row] + new[row] for row in rows], dtype=np.int32)
    slots = [
        int(block_table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for row in rows
        for position in range(context[row], context[row] + new[row])
    ]
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        seq_lens=torch.from_numpy(seq_lens),
        block_table=block_table[rows].to(torch.int32),
        slot_mapping=torch.tensor(slots),
        num_reqs=len(rows),
        num_tokens=int(query_lens.sum()),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        host_query_lens=query_lens,
        host_seq_lens=seq_lens,
    )


def caches(poison: float) -> list[Tensor]:
    return list(torch.full((16, len(SPECS), 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM), poison).unbind(1))


def new_table() -> Tensor:
    return (torch.randperm(15) + 1).view(3, 5)


@pytest.mark.parametrize(("on_host", "fixed_spans"), [(True, False), (False, True)])
def test_every_step_and_layer_as_the_torch_backend(on_host: bool, fixed_spans: bool):
    triton, plain = backend(fixed_spans=fixed_spans), TorchAttention(BLOCK_SIZE)
    ours, theirs = caches(nan), caches(0.0)  # the torch backend reads whole blocks
    table, context = new_table(), [0, 0, 0]
    for new in STEPS:
        meta = metadata(context, new, table)
        if not on_host:
            meta = replace(meta, host_query_lens=None, host_seq_lens=None)
        meta, their_meta = triton.prepare(meta), plain.prepare(replace(meta))
        for spec, our_layer, their_layer in zip(SPECS, ours, theirs, strict=True):
            q, k, v = (torch.randn(meta.num_tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            expected = plain.forward(q, k, v, their_layer, their_meta, spec)
            torch.testing.assert_close(triton.forward(q, k, v, our_layer, meta, spec), expected, atol=2e-5, rtol=2e-5)
        context = [old + count for old, count in zip(context, new, strict=True)]


def test_heads_as_the_projection_left_them():
    triton, plain = backend(), TorchAttention(BLOCK_SIZE)
    meta = metadata([0, 20, 3], [25, 1, 2], new_table())
    ours, theirs = (torch.zeros(16, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM) for _ in range(2))
    meta, their_meta = triton.prepare(meta), plain.prepare(replace(meta))
    angles = torch.rand(meta.num_tokens, 1, HEAD_DIM // 2)
    q_norm, k_norm = torch.rand(2, HEAD_DIM) + 0.5
    heads = torch.randn(meta.num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    q, k = (rotate(normed(x, w), angles.cos(), angles.sin()) for x, w in ((q, q_norm), (k, k_norm)))
    expected = plain.forward(q, k, v.clone(), theirs, their_meta, SPECS[0])
    rotation = Rotation(angles.cos(), angles.sin(), q_norm, k_norm, 1e-5)
    actual = triton.forward_fused(heads, rotation, ours, meta, SPECS[0])
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_a_padded_decode_step_replays_through_another_ones_plan():
    """What worker.graphs does: the plan of a step is copied to where an earlier one's was, and padding writes nothing."""
    triton, table = backend(), new_table()
    layer = torch.randn(16, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)

    def padded(context: list[int], num_rows: int) -> AttentionMetadata:
        meta = metadata(context, [1, 1, 1], table)
        for row in range(num_rows, 3):
            assert meta.host_seq_lens is not None
            meta.host_seq_lens[row] = 0  # shared with seq_lens
            meta.slot_mapping[row] = -1
        return triton.prepare(meta)

    assert triton.captures_decode
    static = padded([70, 3, 40], 3)
    step = padded([5, 33, 0], 2)
    k, v = torch.randn(2, 3, KV_HEADS, HEAD_DIM)
    q = torch.randn(3, HEADS, HEAD_DIM)
    before, replayed = layer.clone(), layer.clone()
    expected = triton.forward(q, k, v, layer, step, SPECS[1])
    step.plan.copy_into(static.plan)
    actual = triton.forward(q, k, v, replayed, replace(step, plan=static.plan), SPECS[1])
    assert torch.equal(actual, expected)
    assert torch.equal(actual[2], torch.zeros_like(actual[2]))
    assert torch.equal(replayed, layer)
    assert (layer != before).flatten(1).any(1).sum() == 2  # the blocks of the two rows


def test_shape_of_a_layer():
    assert backend().kv_shape(7, 16, 2, 32) == (7, 2, 2, 16, 32)


@pytest.mark.parametrize(("block_size", "head_dim", "supported"), [(16, 80, True), (24, 64, False), (16, 512, False)])
def test_sizes(block_size: int, head_dim: int, supported: bool):
    assert TritonAttention.supports(block_size, head_dim) == supported
