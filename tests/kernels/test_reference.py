"""The oracle itself, against an independent dense formulation and hand-made cases."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ropeway_kernels import reference


def test_write_kv_puts_each_token_in_its_slot():
    cache = torch.zeros(3, 2, 2, 4, 8)
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    reference.write_kv(k, v, cache, torch.tensor([6, 9]))
    assert torch.equal(cache[1, 0, :, 2], k[0])
    assert torch.equal(cache[1, 1, :, 2], v[0])
    assert torch.equal(cache[2, 0, :, 1], k[1])
    assert int((cache != 0).sum()) == 4 * 2 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tiles_hold_each_element_where_the_native_kernels_look_for_it(dtype: torch.dtype):
    block_size, head_dim = 8, 16
    cache = torch.randn(3, 2, 2, block_size, head_dim).to(dtype)
    tiles = reference.pack_kv_tiles(cache)
    assert torch.equal(reference.unpack_kv_tiles(tiles), cache)
    step = 2 if dtype == torch.bfloat16 else 1
    k, v = tiles[1, 0, 1].flatten(), tiles[1, 1, 1].flatten()
    for position in range(block_size):
        for d in range(head_dim):
            assert k[(d // step * block_size + position) * step + d % step] == cache[1, 0, 1, position, d]
            assert v[(position // step * head_dim + d) * step + position % step] == cache[1, 1, 1, position, d]


def test_paged_attention_equals_dense_attention_with_an_explicit_mask():
    torch.manual_seed(0)
    length, new, block_size, heads, kv_heads, head_dim = 21, 6, 4, 4, 2, 16
    k, v = torch.randn(length, kv_heads, head_dim), torch.randn(length, kv_heads, head_dim)
    q = torch.randn(new, heads, head_dim)
    blocks = torch.tensor([[3, 1, 5, 2, 7, 6]])
    cache = torch.zeros(8, 2, kv_heads, block_size, head_dim)
    slots = torch.tensor([int(blocks[0, p // block_size]) * block_size + p % block_size for p in range(length)])
    reference.write_kv(k, v, cache, slots)
    for window in (None, 1, 7):
        got = reference.paged_attention(
            q, cache, blocks, torch.tensor([0, new]), torch.tensor([length]), scale=0.25, sliding_window=window
        )
        position = torch.arange(length - new, length)[:, None]
        key = torch.arange(length)[None]
        visible = (key <= position) & (key > position - (window or length))
        want = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.transpose(0, 1).repeat_interleave(2, 0),
            v.transpose(0, 1).repeat_interleave(2, 0),
            attn_mask=visible,
            scale=0.25,
        ).transpose(0, 1)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_soft_cap_bounds_the_logits():
    query, keys = torch.tensor([100.0]).double(), torch.tensor([[1.0], [-1.0]]).double()
    values = torch.tensor([[1.0], [0.0]]).double()
    out = reference.attend_one(query, keys, values, 1.0, 0.5)
    torch.testing.assert_close(out, torch.sigmoid(torch.tensor([1.0]).double()))
