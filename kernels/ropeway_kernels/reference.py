"""The oracle: paged attention, KV write and the elementwise kernels, meant to be read and to be right, never to be fast.

Owns: the meaning of a KV cache block and of every attention option. Must not know: ropeway.
Called by: tests of every attention backend and kernel.

One layer's cache is ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``: index 0 of the second dimension is K and
1 is V. A slot is ``block id * block_size + offset``. The native CPU kernels keep a tensor of the same shape whose
elements are arranged in tiles; `pack_kv_tiles` and `unpack_kv_tiles` say how.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def write_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put each token's K and V into its slot, in place.

    k and v ``[num_tokens, num_kv_heads, head_dim]``; slot_mapping ``[num_tokens]``.
    """
    block_size = kv_cache.shape[3]
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        kv_cache[block, 0, :, offset] = k[token].to(kv_cache.dtype)
        kv_cache[block, 1, :, offset] = v[token].to(kv_cache.dtype)


def read_kv(kv_cache: Tensor, blocks: list[int], length: int) -> tuple[Tensor, Tensor]:
    """K and V of a row's first ``length`` positions, each ``[length, num_kv_heads, head_dim]`` in float64."""
    block_size = kv_cache.shape[3]
    keys, values = [], []
    for position in range(length):
        block, offset = blocks[position // block_size], position % block_size
        keys.append(kv_cache[block, 0, :, offset])
        values.append(kv_cache[block, 1, :, offset])
    return torch.stack(keys).double(), torch.stack(values).double()


def tile_step(dtype: torch.dtype) -> int:
    """Elements along the summed dimension that lie side by side in a tile: bf16 goes in pairs of 32 bits."""
    return 2 if dtype == torch.bfloat16 else 1


def pack_kv_tiles(kv_cache: Tensor) -> Tensor:
    """A plain cache to the native CPU kernels' arrangement, same shape and type.

    Each ``[block_size, head_dim]`` of a block and head becomes a tile that a product can read as packed weights:
    K ``[head_dim / step][block_size][step]`` for Q . K', V ``[block_size / step][head_dim][step]`` for P . V.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    step = tile_step(kv_cache.dtype)
    k = kv_cache[:, 0].reshape(num_blocks, num_kv_heads, block_size, head_dim // step, step).transpose(2, 3)
    v = kv_cache[:, 1].reshape(num_blocks, num_kv_heads, block_size // step, step, head_dim).transpose(3, 4)
    plain = num_blocks, num_kv_heads, block_size, head_dim
    return torch.stack([k.reshape(plain), v.reshape(plain)], 1)


def unpack_kv_tiles(tiles: Tensor) -> Tensor:
    """The inverse of `pack_kv_tiles`."""
    num_blocks, _, num_kv_heads, block_size, head_dim = tiles.shape
    step = tile_step(tiles.dtype)
    k = tiles[:, 0].reshape(num_blocks, num_kv_heads, head_dim // step, block_size, step).transpose(2, 3)
    v = tiles[:, 1].reshape(num_blocks, num_kv_heads, block_size // step, head_dim, step).transpose(3, 4)
    plain = num_blocks, num_kv_heads, block_size, head_dim
    return torch.stack([k.reshape(plain), v.reshape(plain)], 1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x ``[..., size]``, weight ``[size]``. In float64; the result is rounded once, to x's type."""
    wide = x.double()
    wide = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return wide.to(x.dtype)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x ``[rows, size]`` as int8 and float64 scales ``[rows]``: a row's greatest magnitude is 127 steps, ties go to even.
    A row of zeros has scale 0; one with an infinity or a NaN has a scale of NaN; both have zeros."""
    wide = x.double()
    scales = wide.abs().amax(-1) / 127
    steps = (wide / scales[:, None]).nan_to_num(nan=0.0).round()
    scales = scales.where(scales.isfinite(), torch.nan)
    steps = steps.where((scales > 0)[:, None], 0.0)
    return steps.to(torch.int8), scales


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + rotary_dim / 2) of a head by its angle; dimensions from rotary_dim on stay.

    x ``[num_tokens, num_heads, head_dim]``; cos and sin ``[num_tokens, rotary_dim / 2]``. In float64, rounded once.
    """
    half = cos.shape[1]
    wide = x.double()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def gated(x: Tensor, kind: str) -> Tensor:
    """``gate(x[:, :size]) * x[:, size:]`` of x ``[rows, 2 * size]``. In float64, rounded once."""
    first, second = x.double().chunk(2, dim=-1)
    return (GATES[kind](first) * second).to(x.dtype)


def attend_one(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, soft_cap: float | None, sink: float | None = None
) -> Tensor:
    """softmax(cap(query . keys * scale)) . values for one query and one head.

    query ``[head_dim]``, keys and values ``[length, head_dim]``; sink: one more logit, neither scaled nor capped, whose
    value is zero; returns ``[head_dim]``.
    """
    logits = (keys @ query) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if sink is not None:
        logits = torch.cat([logits, logits.new_tensor([sink])])
        values = torch.cat([values, torch.zeros_like(values[:1])])
    weights = torch.exp(logits - logits.max())
    weights = weights / weights.sum()
    return (weights[:, None] * values).sum(0)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a ragged batch over the paged cache; the batch's own K and V are already in it.

    q ``[num_tokens, num_heads, head_dim]``; block_table ``[num_reqs, max_blocks]``; query_start_loc ``[num_reqs + 1]``;
    seq_lens ``[num_reqs]``. With a sliding window a token sees itself and the window - 1 tokens before it. Query head h
    reads KV head ``h // (num_heads // num_kv_heads)``; sinks ``[num_heads]``: see `attend_one`. A row of seq_len 0 yields
    zeros. Computes in float64; returns q's shape and dtype.
    """
    num_heads, num_kv_heads = q.shape[1], kv_cache.shape[2]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q)
    starts = query_start_loc.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            out[starts[row] : starts[row + 1]] = 0
            continue
        keys, values = read_kv(kv_cache, block_table[row].tolist(), length)
        first_position = length - (starts[row + 1] - starts[row])
        for token in range(starts[row], starts[row + 1]):
            position = first_position + token - starts[row]
            begin = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(num_heads):
                kv_head = head // group
                result = attend_one(
                    q[token, head].double(),
                    keys[begin : position + 1, kv_head],
                    values[begin : position + 1, kv_head],
                    scale,
                    soft_cap,
                    None if sinks is None else float(sinks[head]),
                )
                out[token, head] = result.to(out.dtype)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, rounded to its type, and then the norm of what is stored there. Shapes as in `rms_norm`."""
    residual.copy_(residual.double() + x.double())
    return rms_norm(residual, weight, eps)


def to_cache_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to the nearest; e4m3 has no infinity, so what is greater than 448 becomes that."""
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-448.0, 448.0)  # NaN stays
    return x.to(dtype)


def rope_kv_write(
    heads: Tensor,
    kv_layer: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm (where there is one) and rotate q and k; q back in place, k and v into their slots; nothing where that is -1.

    heads ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``: q, k, v. cos and sin ``[num_tokens, 1, rotary_dim /
    2]``. In float64, rounded once to heads' type or the cache's.
    """
    num_kv_heads = kv_layer.shape[2]
    used = slot_mapping >= 0
    q, k, v = torch.split(heads[used].double(), [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    if cos is not None and sin is not None:
        q, k = (rotate(x, cos[used, 0], sin[used, 0]) for x in (q, k))
    heads[used, :num_heads] = q.to(heads.dtype)
    k, v = (to_cache_type(x, kv_layer.dtype) for x in (k, v))
    write_kv(k, v, kv_layer, slot_mapping[used])


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """``target[to] = source[from]`` for each pair (from, to) of ``[n, 2]``; both are ``[num_blocks, ...]``."""
    for begin, to in pairs.tolist():
        target[to] = source[begin]
